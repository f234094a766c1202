"""The routes of the HTTP gateway. What they do is in `gateway`; what they refuse looks like OpenAI's errors."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, nullcontext
from importlib import import_module
from typing import Any

from fastapi import FastAPI
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from common.errors import MiniInferError
from common.wings import has_wing
from router.features import CHAT_BODY, COMPLETION_BODY
from router.gateway import Gateway
from router.http.errors import HttpError, error_response, log_if_internal, status_of
from router.http.middleware import Guard
from router.http.routes import FixedPaths, HoldBody, Routes, json_response
from router.operator_routes import add_operator_routes
from router.served_model import ServedModel

logger = logging.getLogger(__name__)
# What adds the routes of each wing that has some; the last one describes those before it.
ROUTES_OF_WINGS = (
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
    """The ASGI application of one router."""

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
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

    routes = Routes()
    _add_model_routes(routes, gateway)
    add_operator_routes(routes, gateway)
    for entry in ROUTES_OF_WINGS:
        module, _, name = entry.partition(":")
        if has_wing(module):
            getattr(import_module(module), name)(routes, gateway)
    handlers = _error_handlers(gateway, [route.path_format for route in routes.routes])
    inner = FastAPI(routes=[*routes.routes], exception_handlers=handlers, lifespan=lifespan, openapi_url=None)
    fixed = FixedPaths(inner, routes, handlers[MiniInferError], _body_holder(gateway))
    app = Guard(fixed, gateway.config.api_key, routes.open_paths)
    if not has_wing("router.cors"):
        return app
    from router.cors.middleware import with_cors

    # Around the key's check: a browser asks first, without it, whether it may send it.
    return with_cors(app, gateway.http)


def _body_holder(gateway: Gateway) -> HoldBody:
    """What bounds the request bodies that are held together, where that wing is there."""
    if not has_wing("router.body_bounds"):
        return lambda _, receive: nullcontext(receive)
    from router.body_bounds.held_bodies import HeldBodies
    from router.body_bounds.http_settings import BodySettings

    bodies = HeldBodies(gateway.http.of(BodySettings).max_body_memory_mb << 20)
    gateway.memory["body_bytes"] = lambda: bodies.num_bytes
    return bodies.hold


def _log_end(task: asyncio.Task[None]) -> None:
    """Log a bug that has ended a task: nobody waits for its result while the router serves."""
    if not task.cancelled() and (error := task.exception()) is not None:
        logger.error("a background task of the router has ended", exc_info=error)


def _error_handlers(gateway: Gateway, paths: list[str]) -> dict[Any, Any]:
    async def known(request: Request, error: Exception) -> Response:
        gateway.refused(request.scope, status_of(error))
        logged_id = log_if_internal(request.scope, error)
        return error_response(error, request.scope, {"x-request-id": logged_id} if logged_id else None)

    async def http(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        messages = {404: _no_such_path(request.url.path, paths), 405: "this path does not take this method"}
        message = messages.get(error.status_code, "the request is not valid")
        answer = await known(request, HttpError(error.status_code, message))
        answer.headers.update(error.headers or {})  # Allow
        return answer

    # The last one is for bugs: they are logged, the client learns nothing but that.
    return {MiniInferError: known, HTTPException: http, Exception: known}


def _no_such_path(path: str, paths: list[str]) -> str:
    """What a client is told that asks for a path which is none of `paths`."""
    if not has_wing("router.path_hints"):
        return "no such path"
    from router.path_hints.paths import no_such_path

    return no_such_path(path, paths)


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
    routes.add("POST", "/v1/completions", gateway.completions, "the continuation of a text", COMPLETION_BODY)
    routes.add("GET", "/v1/models", models, "the models that are served")
    routes.add("GET", "/v1/models/{name:path}", model, "one of them, or 404")
