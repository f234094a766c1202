"""The routes for who runs the router: its health, its version, its metrics."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from starlette.requests import Request
from starlette.responses import Response

from common.metrics import CONTENT_TYPE
from common.model_files import DRY_RUN_MODEL_NAME
from common.version import VERSION
from router.config import ROLES
from router.gateway import Gateway
from router.http.routes import Routes, json_response
from router.workers.worker_link import WorkerLink


def add_operator_routes(routes: Routes, gateway: Gateway) -> None:
    async def healthz(_: Request) -> Response:
        first = gateway.models[0]
        infos = first.workers.infos()
        cuda_graphs = all(info.cuda_graphs for info in infos) if infos else None
        return json_response(
            {
                "status": "ok",
                "model": first.name,
                "roles": _roles(first.workers.links),
                "quantization": infos[0].quantization if infos else None,
                "cuda_graphs": cuda_graphs,
                # The same under the names of the flags.
                "use_cuda_graph": cuda_graphs,
                "quant_mode": infos[0].quantization if infos else None,
                "dry": infos[0].model == DRY_RUN_MODEL_NAME if infos else None,
                "models": {model.name: _roles(model.workers.links) for model in gateway.base_models},
            }
        )

    async def livez(_: Request) -> Response:
        return json_response({"status": "ok"})

    async def ready(_: Request) -> Response:
        # One model without workers must not take the router, and with it the other models, out of service.
        if not any(model.workers.usable("decode") for model in gateway.base_models):
            return json_response({"status": "no decode worker is ready"}, 503)
        return json_response({"status": "ok"})

    async def version(_: Request) -> Response:
        return json_response({"version": VERSION})

    async def metrics(_: Request) -> Response:
        return Response(gateway.metrics_text(), headers={"content-type": CONTENT_TYPE})

    routes.add("GET", "/healthz", healthz, "what is served by how many workers")
    routes.add("GET", "/livez", livez, "200 while the router runs")
    routes.add("GET", "/readyz", ready, "200 while requests for any model can be served")
    routes.add("GET", "/health", ready, "the same")
    routes.add("GET", "/version", version, "the router's version")
    routes.add("GET", "/metrics", metrics, "metrics for Prometheus")


def _roles(links: Sequence[WorkerLink]) -> dict[str, int]:
    """Number of attached workers of each role."""
    roles = Counter(link.role for link in links if link.info is not None)
    return {role: roles[role] for role in ROLES}
