"""The routes of the HTTP gateway. What they do is in `gateway`; what they refuse looks like OpenAI's errors."""

from __future__ import annotations

import ipaddress
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import orjson
from fastapi import FastAPI, Request
from starlette.exceptions import HTTPException
from starlette.responses import Response
from starlette.routing import Route

from common.errors import InvalidRequestError, MiniInferError, NotFoundError, UnauthenticatedError
from common.metrics import CONTENT_TYPE
from common.version import VERSION
from router.errors import HttpError, error_body, error_headers, log_if_internal, status_of
from router.gateway import Gateway
from router.middleware import Guard
from router.schemas import ChatCompletionBody, CompletionBody, DetokenizeBody, TokenizeBody

DRAIN_GRACE_SECONDS = 30.0
Handler = Callable[[Request], Awaitable[Any]]


def create_app(gateway: Gateway) -> Any:
    """The ASGI application of one router."""

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        await gateway.start()
        try:
            yield
        finally:
            await gateway.stop()

    app = FastAPI(title="mini-infer", version=VERSION, lifespan=lifespan)
    _add_error_handlers(app, gateway)
    _add_model_routes(app, gateway)
    _add_health_routes(app, gateway)
    _add_operator_routes(app, gateway)
    return Guard(app, gateway.config.api_key)


def _json(value: Any, status: int = 200) -> Response:
    return Response(orjson.dumps(value), status, media_type="application/json")


def _add_error_handlers(app: FastAPI, gateway: Gateway) -> None:
    async def known(request: Request, error: Exception) -> Response:
        status = status_of(error)
        gateway.metrics.refused(status)
        headers = {name.decode(): value.decode() for name, value in error_headers(error)}
        if logged_id := log_if_internal(request.scope, error):
            headers["x-request-id"] = logged_id
        return Response(error_body(error), status, headers=headers)

    async def http(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        messages = {404: "no such path", 405: "this path does not take this method"}
        message = messages.get(error.status_code, "the request is not valid")
        return await known(request, HttpError(error.status_code, message))

    app.add_exception_handler(MiniInferError, known)
    app.add_exception_handler(HTTPException, http)
    # A bug: it is logged, the client learns nothing but that.
    app.add_exception_handler(Exception, known)


def _add_model_routes(app: FastAPI, gateway: Gateway) -> None:
    def post(path: str, handler: Handler, body: type[Any]) -> None:
        # The body is read and checked by hand (bounds, duplicate keys); its schema is for the documentation.
        # The plain route answers: solving dependencies, of which there are none, would cost 34 us a request.
        # It comes first, since routes are tried in order.
        app.router.routes.insert(0, Route(path, handler, methods=["POST"], include_in_schema=False))
        schema = {"requestBody": {"content": {"application/json": {"schema": body.model_json_schema()}}}}
        app.add_api_route(path, handler, methods=["POST"], openapi_extra=schema, response_model=None)

    async def chat(request: Request) -> Response:
        with gateway.bodies.hold() as held:
            return await gateway.chat_completions(request, held)

    async def completions(request: Request) -> Response:
        with gateway.bodies.hold() as held:
            return await gateway.completions(request, held)

    async def tokenize(request: Request) -> Response:
        with gateway.bodies.hold() as held:
            return _json(await gateway.tokenize(request, held))

    async def detokenize(request: Request) -> Response:
        with gateway.bodies.hold() as held:
            return _json(await gateway.detokenize(request, held))

    post("/detokenize", detokenize, DetokenizeBody)
    post("/tokenize", tokenize, TokenizeBody)
    post("/v1/completions", completions, CompletionBody)
    post("/v1/chat/completions", chat, ChatCompletionBody)

    def card() -> dict[str, Any]:
        infos = gateway.workers.infos()
        return {
            "id": gateway.model_name,
            "object": "model",
            "created": gateway.created,
            "owned_by": "mini-infer",
            "max_model_len": min((info.max_model_len for info in infos), default=None),
        }

    @app.get("/v1/models")
    async def models() -> Response:
        return _json({"object": "list", "data": [card()]})

    @app.get("/v1/models/{name:path}")
    async def model(name: str) -> Response:
        gateway.check_model(name)
        return _json(card())


def _add_health_routes(app: FastAPI, gateway: Gateway) -> None:
    def is_ready() -> bool:
        return bool(gateway.workers.usable("decode"))

    @app.get("/healthz")
    async def healthz() -> Response:
        infos = gateway.workers.infos()
        roles = Counter(info.role for info in infos)
        return _json(
            {
                "status": "ok",
                "model": gateway.model_name,
                "roles": {role: roles[role] for role in ("prefill", "decode")},
                "quantization": infos[0].quantization if infos else None,
                "cuda_graphs": all(info.cuda_graphs for info in infos) if infos else None,
            }
        )

    @app.get("/livez")
    async def livez() -> Response:
        return _json({"status": "ok"})

    async def ready() -> Response:
        return _json({"status": "ok"}) if is_ready() else _json({"status": "no decode worker is ready"}, 503)

    app.add_api_route("/health", ready, methods=["GET"])
    app.add_api_route("/readyz", ready, methods=["GET"])

    @app.get("/version")
    async def version() -> Response:
        return _json({"version": VERSION})

    @app.get("/metrics")
    async def metrics() -> Response:
        dispatcher = gateway.dispatcher
        text = gateway.metrics.render(gateway.workers, dispatcher.num_running, dispatcher.num_waiting)
        return Response(text, headers={"content-type": CONTENT_TYPE})


def _add_operator_routes(app: FastAPI, gateway: Gateway) -> None:
    @app.get("/v1/cluster")
    async def cluster() -> Response:
        dispatcher = gateway.dispatcher
        return _json(
            {
                "model": gateway.model_name,
                "policy": gateway.config.policy,
                "running": dispatcher.num_running,
                "waiting": dispatcher.num_waiting,
                "workers": gateway.workers.describe(),
            }
        )

    @app.get("/explain/{request_id}")
    async def explain(request_id: str) -> Response:
        choices = gateway.explain.find(request_id, time.monotonic())
        if not choices:
            raise NotFoundError("this request is not known, or was too long ago")
        return _json({"id": request_id, "choices": choices})

    @app.post("/v1/workers/{worker_id}/drain")
    async def drain(worker_id: str, request: Request) -> Response:
        # Without a key anybody who reaches the port could empty the cluster: then only from this machine.
        host = request.client.host if request.client else ""
        if not gateway.config.api_key and not _is_loopback(host):
            raise UnauthenticatedError("draining from another machine needs an API key on the router (--api-key)")
        text = request.query_params.get("grace_seconds", str(DRAIN_GRACE_SECONDS))
        try:
            grace = float(text)
        except ValueError:
            grace = -1.0
        if not 0 <= grace <= 3600:
            raise InvalidRequestError("grace_seconds must be between 0 and 3600", "grace_seconds")
        num_open = await gateway.workers.by_id(worker_id).drain(grace)
        return _json({"id": worker_id, "draining": True, "open_requests": num_open})


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
