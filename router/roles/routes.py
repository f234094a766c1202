"""The route that changes a worker's role."""

from __future__ import annotations

import logging
from typing import Literal

from starlette.requests import Request
from starlette.responses import Response

from common.errors import NotFoundError
from router.api.schemas import Body
from router.gateway import Gateway
from router.http.body import parse_body, read_json_object
from router.http.errors import HttpError
from router.http.routes import Routes, json_response
from router.operators.access import check_operator, has_other
from router.workers.worker_link import WorkerLink

logger = logging.getLogger(__name__)


class RoleBody(Body):
    """POST /v1/workers/ID/role"""

    role: Literal["prefill", "decode"]


def add_role_route(routes: Routes, gateway: Gateway) -> None:
    async def change(request: Request) -> Response:
        check_operator(request, gateway.config.api_key, "changing roles")
        role = parse_body(RoleBody, await read_json_object(request)).role
        link = gateway.workers.find(request.path_params["worker_id"])
        if link is None:
            raise NotFoundError(f"no worker {request.path_params['worker_id']!r}")
        if role != link.role:
            _change(link, role, gateway)
        return json_response({"id": link.worker_id, "role": link.role, "started_as": link.listed_role})

    routes.add("POST", "/v1/workers/{worker_id}/role", change, "use a worker for prompts, or to generate", RoleBody)


def _change(link: WorkerLink, role: str, gateway: Gateway) -> None:
    """Change the role for new requests; open ones stay. Raises HttpError if no request could be served then."""
    model = gateway.workers.model_of(link)
    if role == "prefill" and not has_other(model, link):
        raise HttpError(
            409, f"{link.worker_id} is the only decode worker of {model.name}: without one nothing is served"
        )
    if role == "prefill" and not (link.info and link.info.transports):
        raise HttpError(409, f"{link.worker_id} has no transport for the KV of prompts: it can only decode")
    link.role = role
    logger.info("%s becomes a %s worker", link.worker_id, role)
    model.on_usable()
