"""The route for who runs the cluster: what it does now."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response

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

    routes.add("GET", "/v1/cluster", cluster, "the workers and what they do")


def _memory(gateway: Gateway) -> dict[str, int]:
    """What the router's process holds, and how much memory that takes."""
    models = gateway.base_models
    return {
        "private_bytes": resident().private_bytes,
        "index_blocks": sum(model.workers.index.num_keys for model in models),
        "journals": sum(len(model.dispatcher.open_choices) for model in models),
        "explain_entries": sum(len(model.dispatcher.log or ()) for model in models),
        "grammars": num_known_grammars(),
        "body_bytes": gateway.bodies.num_bytes,
    }
