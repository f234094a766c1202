"""Routes for who runs the cluster: what it does now, and why a request went where it went."""

from __future__ import annotations

import time

from starlette.requests import Request
from starlette.responses import Response

from common.errors import NotFoundError
from common.memory import resident
from router.features import num_known_grammars
from router.gateway import Gateway
from router.http.routes import Routes, json_response


def add_operator_routes(routes: Routes, gateway: Gateway) -> None:
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

    routes.add("GET", "/v1/cluster", cluster, "the workers and what they do")
    routes.add("GET", "/explain/{request_id}", explain, "the decisions and the time line of one request")


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
