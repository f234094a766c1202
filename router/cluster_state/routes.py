"""GET /v1/cluster: requests, memory and workers of one router."""

from __future__ import annotations

import time

from starlette.requests import Request
from starlette.responses import Response

from common.resident import resident
from common.wings import has_wing
from router.cluster_state.workers import describe
from router.gateway import Gateway
from router.http.routes import Routes, json_response
from router.routing.settings import RoutingSettings


def add_cluster_route(routes: Routes, gateway: Gateway) -> None:
    async def cluster(_: Request) -> Response:
        models = {
            model.name: {"running": model.dispatcher.num_running, "waiting": model.dispatcher.num_waiting}
            for model in gateway.base_models
        }
        now = time.monotonic()
        return json_response(
            {
                "model": gateway.models[0].name,
                "policy": gateway.config.of(RoutingSettings).policy,
                "running": sum(counts["running"] for counts in models.values()),
                "waiting": sum(counts["waiting"] for counts in models.values()),
                "models": models,
                "memory": _memory(gateway),
                "workers": [describe(link, gateway.workers.model_of(link), now) for link in gateway.workers.links],
            }
        )

    routes.add("GET", "/v1/cluster", cluster, "the workers and what they do")


def _memory(gateway: Gateway) -> dict[str, int]:
    """Return the sizes of what the router's process holds, and its memory."""
    models = gateway.base_models
    return {
        "private_bytes": resident().private_bytes,
        "index_blocks": sum(model.workers.index.num_keys for model in models),
        "journals": sum(len(model.dispatcher.open_choices) for model in models),
        "grammars": _num_known_grammars(),
        **{name: count() for name, count in gateway.memory.items()},
    }


def _num_known_grammars() -> int:
    """Return the number of grammars whose check this process remembers."""
    if not has_wing("router.grammar"):
        return 0
    from router.grammar.answer_format import CHECKS

    return len(CHECKS)
