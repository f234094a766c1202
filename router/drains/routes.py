"""Routes that take workers out of service and back."""

from __future__ import annotations

from typing import Any

import grpc
from starlette.requests import Request
from starlette.responses import Response

from common.errors import InvalidRequestError, NotFoundError, UnavailableError
from protos import types_pb2 as pb
from router.gateway import Gateway
from router.http.errors import HttpError
from router.http.routes import Routes, json_response
from router.operators.access import check_operator, has_other
from router.workers.worker_link import WorkerLink
from router.workers.worker_stream import CALL_TIMEOUT_SECONDS

DRAIN_GRACE_SECONDS = 30.0
MAX_GRACE_SECONDS = 3600.0


def add_drain_routes(routes: Routes, gateway: Gateway) -> None:
    async def drain(request: Request) -> Response:
        check_operator(request, gateway.config.api_key, "draining")
        link = _worker(request, gateway)
        model = gateway.workers.model_of(link)
        if not _is_forced(request) and not has_other(model, link):
            raise HttpError(
                409,
                f"{link.worker_id} is the only {link.role} worker of {model.name}: "
                "add ?force=true to drain it anyway",
            )
        asked = pb.DrainRequest(grace_seconds=_grace_seconds(request))
        reply: pb.DrainReply = await _ask(link, "Drain", asked, "refuses to drain")
        link.learn_drain(True, reply.num_drain_changes)
        return json_response({"id": link.worker_id, "draining": True, "open_requests": reply.num_open_requests})

    async def undrain(request: Request) -> Response:
        check_operator(request, gateway.config.api_key, "draining")
        link = _worker(request, gateway)
        reply: pb.UndrainReply = await _ask(link, "Undrain", pb.UndrainRequest(), "is stopping")
        link.learn_drain(False, reply.num_drain_changes)
        return json_response({"id": link.worker_id, "draining": False})

    grace = {"grace_seconds": DRAIN_GRACE_SECONDS, "force": False}
    told = "no new requests for a worker, which ends when its open ones have"
    routes.add("POST", "/v1/workers/{worker_id}/drain", drain, told, query=grace)
    routes.add("POST", "/v1/workers/{worker_id}/undrain", undrain, "take a draining worker back")


async def _ask(link: WorkerLink, method: str, request: Any, refusal: str) -> Any:
    """Call a method of the worker's service and return its reply. Raises UnavailableError with the text `refusal`."""
    stream, worker_id = link.stream, link.worker_id
    if stream is None:
        raise UnavailableError(f"worker {worker_id} is not connected")
    try:
        return await getattr(stream.stub, method)(request, timeout=CALL_TIMEOUT_SECONDS, metadata=stream.metadata)
    except grpc.aio.AioRpcError as error:
        raise UnavailableError(f"worker {worker_id} {refusal}: {error.code().name}") from None


def _worker(request: Request, gateway: Gateway) -> WorkerLink:
    worker_id = request.path_params["worker_id"]
    link = gateway.workers.find(worker_id)
    if link is None:
        raise NotFoundError(f"no worker {worker_id!r}")
    return link


def _grace_seconds(request: Request) -> float:
    try:
        seconds = float(request.query_params.get("grace_seconds", str(DRAIN_GRACE_SECONDS)))
    except ValueError:
        seconds = -1.0
    if not 0 <= seconds <= MAX_GRACE_SECONDS:
        raise InvalidRequestError(f"grace_seconds must be between 0 and {MAX_GRACE_SECONDS:.0f}", "grace_seconds")
    return seconds


def _is_forced(request: Request) -> bool:
    text = request.query_params.get("force", "false").lower()
    if text not in ("true", "false", "1", "0"):
        raise InvalidRequestError("force must be true or false", "force")
    return text in ("true", "1")
