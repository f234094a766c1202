"""Routes of the HTTP gateway. `gateway` has the handlers that use a model; refusals look like OpenAI's errors."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Scope

from common.metrics import CONTENT_TYPE
from common.wings import call_wing
from router.features import CHAT_BODY
from router.gateway import Gateway
from router.http.errors import HttpError, error_response, log_if_internal, status_of
from router.http.routes import Application, HoldBody, Routes, json_response
from router.served_model import ServedModel

logger = logging.getLogger(__name__)
# The functions that add the routes of wings; the last one documents all routes before it.
ROUTES_OF_WINGS = (
    "router.completions_api.routes:add_completion_route",
    "router.cluster_state.routes:add_cluster_route",
    "router.tokenize.routes:add_tokenize_routes",
    "router.messages_api.routes:add_message_routes",
    "router.responses_api.routes:add_response_routes",
    "router.embeddings_api.routes:add_embedding_routes",
    "router.explain.routes:add_explain_route",
    "router.drains.routes:add_drain_routes",
    "router.roles.routes:add_role_route",
    "router.lora.routes:add_lora_routes",
    "router.server_pages.routes:add_server_pages",
    "router.page.routes:add_page",
    "router.api_docs.pages:add_documentation",
)


def create_app(gateway: Gateway) -> Any:
    """Create the ASGI application of one router."""

    @asynccontextmanager
    async def lifespan(_: object) -> AsyncIterator[None]:
        await gateway.workers.start()
        tasks = [asyncio.create_task(run()) for run in routes.tasks]
        for task in tasks:
            task.add_done_callback(_log_end)
        try:
            yield
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await gateway.workers.stop()

    def answer_error(scope: Scope, error: Exception) -> Response:
        headers: dict[str, str] = {}
        if isinstance(error, HTTPException):  # from Starlette: handlers raise MiniInferError, or have a bug
            headers.update(error.headers or {})  # Allow
            message = "this path does not take this method"
            if error.status_code == 404:
                paths = [route.path_format for route in routes.routes]
                hint: str | None = call_wing("router.path_hints.paths:no_such_path", Request(scope).url.path, paths)
                message = hint or "no such path"
            error = HttpError(error.status_code, message)
        gateway.refused(scope, status_of(error))
        if logged_id := log_if_internal(scope, error):
            headers["x-request-id"] = logged_id
        return error_response(error, scope, headers)

    routes = Routes()
    _add_model_routes(routes, gateway)
    _add_operator_routes(routes, gateway)
    for add_routes in ROUTES_OF_WINGS:
        call_wing(add_routes, routes, gateway)
    hold_body: HoldBody | None = call_wing("router.body_bounds.held_bodies:body_holder", gateway.http, gateway.memory)
    app = Application(routes, gateway.config.api_key, lifespan, answer_error, hold_body)
    # Outside the check of the API key: a browser first asks, without the key, whether it may send it.
    return call_wing("router.cors.middleware:with_cors", app, gateway.http) or app


def _log_end(task: asyncio.Task[None]) -> None:
    """Log a bug that has ended a task: nobody awaits the task while the router serves."""
    if not task.cancelled() and (error := task.exception()) is not None:
        logger.error("a background task of the router has ended", exc_info=error)


def _add_model_routes(routes: Routes, gateway: Gateway) -> None:
    def card(model: ServedModel) -> dict[str, Any]:
        return {
            "id": model.name,
            "object": "model",
            "created": model.created,
            "owned_by": "mini-infer",
            "max_model_len": min((info.max_model_len for info in model.workers.infos()), default=None),
            **({"parent": model.parent} if model.adapter else {}),
        }

    async def models(_: Request) -> Response:
        return json_response({"object": "list", "data": [card(model) for model in gateway.models]})

    async def model(request: Request) -> Response:
        return json_response(card(gateway.model(request.path_params["name"])))

    routes.add("POST", "/v1/chat/completions", gateway.chat_completions, "the answer to a conversation", CHAT_BODY)
    routes.add("GET", "/v1/models", models, "the models that are served")
    routes.add("GET", "/v1/models/{name:path}", model, "one of them, or 404")


def _add_operator_routes(routes: Routes, gateway: Gateway) -> None:
    """Add the routes for operators: health and metrics."""

    async def livez(_: Request) -> Response:
        return json_response({"status": "ok"})

    async def ready(_: Request) -> Response:
        # One model without workers must not take the router, and with it the other models, out of service.
        if not any(model.workers.usable("decode") for model in gateway.base_models):
            return json_response({"status": "no decode worker is ready"}, 503)
        return json_response({"status": "ok"})

    async def metrics(_: Request) -> Response:
        return Response(gateway.metrics_text(), headers={"content-type": CONTENT_TYPE})

    routes.add("GET", "/livez", livez, "200 while the router runs")
    routes.add("GET", "/readyz", ready, "200 while requests for any model can be served")
    routes.add("GET", "/health", ready, "the same")
    routes.add("GET", "/metrics", metrics, "metrics for Prometheus")
