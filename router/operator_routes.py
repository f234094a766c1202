"""Routes for who runs the cluster: what it does now, why a request went where it went, and taking workers out."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable
from typing import Any

import orjson
from starlette.requests import Request
from starlette.responses import Response

from common.errors import InvalidRequestError, NotFoundError, UnauthenticatedError
from common.memory import resident
from common.net.hosts import is_loopback
from router.features import num_known_grammars
from router.gateway import Gateway
from router.http.errors import HttpError
from router.workers.worker_link import WorkerLink

DRAIN_GRACE_SECONDS = 30.0
MAX_GRACE_SECONDS = 3600.0
Handler = Callable[[Request], Awaitable[Response]]


def json_response(value: Any, status: int = 200) -> Response:
    return Response(orjson.dumps(value), status, media_type="application/json")


def add_operator_routes(add: Callable[[str, str, Handler, str], None], gateway: Gateway) -> None:
    """Call `add` with method, path, handler and what it does, for each."""

    async def cluster(_: Request) -> Response:
        models = {
            model.name: {"running": model.dispatcher.num_running, "waiting": model.dispatcher.num_waiting}
            for model in gateway.base_models
        }
        return json_response(
            {
                "model": gateway.models[0].name,
                "policy": gateway.config.policy,
                "running": sum(counts["running"] for counts in models.values()),
                "waiting": sum(counts["waiting"] for counts in models.values()),
                "models": models,
                "memory": _memory(gateway),
                "workers": gateway.workers.describe(),
            }
        )

    async def explain(request: Request) -> Response:
        request_id = request.path_params["request_id"]
        for model in gateway.base_models:
            if choices := model.explain.find(request_id, time.monotonic()):
                return json_response({"id": request_id, "model": model.name, "choices": choices})
        raise NotFoundError("this request is not known, or was too long ago")

    async def drain(request: Request) -> Response:
        _check_operator(request, gateway)
        link = _worker(request, gateway)
        if not _has_flag(request, "force") and not link.model.has_other(link):
            raise HttpError(
                409,
                f"{link.worker_id} is the only {link.role} worker of {link.model.name}: "
                "add ?force=true to drain it anyway",
            )
        num_open = await link.drain(_grace_seconds(request))
        return json_response({"id": link.worker_id, "draining": True, "open_requests": num_open})

    async def undrain(request: Request) -> Response:
        _check_operator(request, gateway)
        link = _worker(request, gateway)
        await link.undrain()
        return json_response({"id": link.worker_id, "draining": False})

    grace = "no new requests for a worker, which ends when its open ones have; ?grace_seconds=30&force=false"
    add("GET", "/v1/cluster", cluster, "the workers and what they do")
    add("GET", "/explain/{request_id}", explain, "the decisions and the time line of one request")
    add("POST", "/v1/workers/{worker_id}/drain", drain, grace)
    add("POST", "/v1/workers/{worker_id}/undrain", undrain, "take a draining worker back")


def _memory(gateway: Gateway) -> dict[str, int]:
    """What the router's process holds, and how much memory that takes."""
    models = gateway.base_models
    return {
        "private_bytes": resident().private_bytes,
        "index_blocks": sum(model.workers.index.num_keys for model in models),
        "journals": sum(len(model.dispatcher.open_choices) for model in models),
        "explain_entries": sum(len(model.explain) for model in models),
        "grammars": num_known_grammars(),
        "body_bytes": gateway.bodies.num_bytes,
    }


def _worker(request: Request, gateway: Gateway) -> WorkerLink:
    worker_id = request.path_params["worker_id"]
    link = gateway.workers.find(worker_id)
    if link is None:
        raise NotFoundError(f"no worker {worker_id!r}")
    return link


def _check_operator(request: Request, gateway: Gateway) -> None:
    """Without an API key, refuse requests from other machines and from pages in a browser: anybody who reaches the
    port could drain the cluster."""
    if gateway.config.api_key:
        return
    host = request.client.host if request.client else ""
    if not is_loopback(host) or "origin" in request.headers:
        raise UnauthenticatedError(
            "draining from another machine or a page needs an API key on the router (--api-key)"
        )


def _grace_seconds(request: Request) -> float:
    try:
        seconds = float(request.query_params.get("grace_seconds", str(DRAIN_GRACE_SECONDS)))
    except ValueError:
        seconds = -1.0
    if not 0 <= seconds <= MAX_GRACE_SECONDS:
        raise InvalidRequestError(f"grace_seconds must be between 0 and {MAX_GRACE_SECONDS:.0f}", "grace_seconds")
    return seconds


def _has_flag(request: Request, name: str) -> bool:
    text = request.query_params.get(name, "false").lower()
    if text not in ("true", "false", "1", "0"):
        raise InvalidRequestError(f"{name} must be true or false", name)
    return text in ("true", "1")
