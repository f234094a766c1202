"""GET /explain/{id}, with one log for each model of a router."""

from __future__ import annotations

import time

from starlette.requests import Request
from starlette.responses import Response

from common.errors import NotFoundError
from router.costs.roles import PolicyRoles
from router.explain.log import ExplainLog
from router.gateway import Gateway
from router.http.routes import Routes, json_response


def add_explain_route(routes: Routes, gateway: Gateway) -> None:
    """Add the route, and start logging."""
    logs = {model.name: ExplainLog() for model in gateway.base_models}
    for model in gateway.base_models:
        model.dispatcher.log, roles = logs[model.name], model.dispatcher.roles
        assert isinstance(roles, PolicyRoles)  # explain needs the wing of costs
        roles.on_decision = logs[model.name].decided
    gateway.memory["explain_entries"] = lambda: sum(map(len, logs.values()))

    async def explain(request: Request) -> Response:
        request_id = request.path_params["request_id"]
        for name, log in logs.items():
            if choices := log.find(request_id, time.monotonic()):
                return json_response({"id": request_id, "model": name, "choices": choices})
        raise NotFoundError("this request is not known, or was too long ago")

    routes.add("GET", "/explain/{request_id}", explain, "the decisions and the time line of one request")
