"""The routes of the HTTP gateway. What they do is in `gateway`; what they refuse looks like OpenAI's errors."""

from __future__ import annotations

import ipaddress
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from difflib import get_close_matches
from typing import Any

import orjson
from pydantic import BaseModel
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import HTMLResponse, Response
from starlette.routing import Route

from common.errors import InvalidRequestError, MiniInferError, NotFoundError, UnauthenticatedError
from common.metrics import CONTENT_TYPE
from router.api_docs import Operation, openapi, page
from router.errors import HttpError, error_body, error_headers, log_if_internal, status_of
from router.gateway import Gateway
from router.middleware import Guard
from router.schemas import ChatCompletionBody, CompletionBody, DetokenizeBody, TokenizeBody

VERSION = "0.1.0"
DRAIN_GRACE_SECONDS = 30.0
MAX_GUESSED_PATH = 64  # characters: what is longer is no slip
Handler = Callable[[Request], Awaitable[Response]]


class Routes:
    """Routes in the order in which they are tried, with what the documentation says of each. A GET answers HEAD,
    too."""

    def __init__(self) -> None:
        self.routes: list[Route] = []
        self.operations: list[Operation] = []

    def add(
        self, method: str, path: str, handler: Handler, summary: str, body: type[BaseModel] | None = None
    ) -> None:
        self.routes.append(Route(path, handler, methods=[method]))
        self.operations.append(Operation(method, path.replace(":path}", "}"), summary, body))


def create_app(gateway: Gateway) -> Any:
    """The ASGI application of one router."""

    @asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[None]:
        await gateway.start()
        try:
            yield
        finally:
            await gateway.stop()

    routes = Routes()
    _add_model_routes(routes, gateway)
    _add_health_routes(routes, gateway)
    _add_operator_routes(routes, gateway)
    _add_documentation(routes)
    handlers = _error_handlers(gateway, [operation.path for operation in routes.operations])
    inner = Starlette(routes=routes.routes, exception_handlers=handlers, lifespan=lifespan)
    app = Guard(inner, gateway.config.api_key)
    if not gateway.cors_origins:
        return app
    # Around the key's check: a browser asks first, without it, whether it may send it.
    return CORSMiddleware(
        app,
        allow_origins=gateway.cors_origins,
        allow_methods=["GET", "POST"],
        allow_headers=["*"],
        expose_headers=["x-request-id", "x-mini-infer-id", "retry-after"],
    )


def _json(value: Any, status: int = 200) -> Response:
    return Response(orjson.dumps(value), status, media_type="application/json")


def _error_handlers(gateway: Gateway, paths: list[str]) -> dict[Any, Any]:
    async def known(request: Request, error: Exception) -> Response:
        status = status_of(error)
        gateway.metrics.refused(status)
        headers = {name.decode(): value.decode() for name, value in error_headers(error)}
        if logged_id := log_if_internal(request.scope, error):
            headers["x-request-id"] = logged_id
        return Response(error_body(error), status, headers=headers)

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
    """Say which path is meant: most such requests come from a base URL with /v1 missing, or twice."""
    if len(path) > MAX_GUESSED_PATH:
        return "no such path"
    meant = [known for known in paths if path.endswith(known) or known == f"/v1{path.rstrip('/')}"]
    near = max(meant, key=len, default=None) or next(iter(get_close_matches(path, paths, 1)), None)
    return f"no such path; did you mean {near}?" if near else "no such path"


def _add_documentation(routes: Routes) -> None:
    description = openapi("mini-infer", VERSION, routes.operations)
    text, document = page(description), orjson.dumps(description)

    async def documentation(_: Request) -> Response:
        return HTMLResponse(text)

    async def schema(_: Request) -> Response:
        return Response(document, media_type="application/json")

    routes.add("GET", "/docs", documentation, "this page")
    routes.add("GET", "/openapi.json", schema, "its content for programs")


def _add_model_routes(routes: Routes, gateway: Gateway) -> None:
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

    def card() -> dict[str, Any]:
        infos = gateway.workers.infos()
        return {
            "id": gateway.model_name,
            "object": "model",
            "created": gateway.created,
            "owned_by": "mini-infer",
            "max_model_len": min((info.max_model_len for info in infos), default=None),
        }

    async def models(_: Request) -> Response:
        return _json({"object": "list", "data": [card()]})

    async def model(request: Request) -> Response:
        gateway.check_model(request.path_params["name"])
        return _json(card())

    routes.add("POST", "/v1/chat/completions", chat, "the answer to a conversation", ChatCompletionBody)
    routes.add("POST", "/v1/completions", completions, "the continuation of a text", CompletionBody)
    routes.add("GET", "/v1/models", models, "the model that is served")
    routes.add("GET", "/v1/models/{name:path}", model, "the same, or 404 for another model")
    routes.add("POST", "/tokenize", tokenize, "the token ids of a text or a conversation", TokenizeBody)
    routes.add("POST", "/detokenize", detokenize, "the text of token ids", DetokenizeBody)


def _add_health_routes(routes: Routes, gateway: Gateway) -> None:
    async def healthz(_: Request) -> Response:
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

    async def livez(_: Request) -> Response:
        return _json({"status": "ok"})

    async def ready(_: Request) -> Response:
        is_ready = bool(gateway.workers.usable("decode"))
        return _json({"status": "ok"}) if is_ready else _json({"status": "no decode worker is ready"}, 503)

    async def version(_: Request) -> Response:
        return _json({"version": VERSION})

    async def metrics(_: Request) -> Response:
        dispatcher = gateway.dispatcher
        text = gateway.metrics.render(gateway.workers, dispatcher.num_running, dispatcher.num_waiting)
        return Response(text, headers={"content-type": CONTENT_TYPE})

    routes.add("GET", "/healthz", healthz, "what is served by how many workers")
    routes.add("GET", "/livez", livez, "200 while the router runs")
    routes.add("GET", "/readyz", ready, "200 while requests can be served")
    routes.add("GET", "/health", ready, "the same")
    routes.add("GET", "/version", version, "the router's version")
    routes.add("GET", "/metrics", metrics, "metrics for Prometheus")


def _add_operator_routes(routes: Routes, gateway: Gateway) -> None:
    async def cluster(_: Request) -> Response:
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

    async def explain(request: Request) -> Response:
        request_id = request.path_params["request_id"]
        choices = gateway.explain.find(request_id, time.monotonic())
        if not choices:
            raise NotFoundError("this request is not known, or was too long ago")
        return _json({"id": request_id, "choices": choices})

    async def drain(request: Request) -> Response:
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
        worker_id = request.path_params["worker_id"]
        num_open = await gateway.workers.by_id(worker_id).drain(grace)
        return _json({"id": worker_id, "draining": True, "open_requests": num_open})

    routes.add("GET", "/v1/cluster", cluster, "the workers and what they do")
    routes.add("GET", "/explain/{request_id}", explain, "the decisions and the time line of one request")
    routes.add("POST", "/v1/workers/{worker_id}/drain", drain, "no new requests for a worker; ?grace_seconds=30")


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
