"""Whether a request may change the cluster, and whether the cluster can do without a worker."""

from __future__ import annotations

from starlette.requests import Request

from common.errors import UnauthenticatedError
from common.net.hosts import is_loopback
from router.workers.model_workers import ModelWorkers
from router.workers.worker_link import WorkerLink


def check_operator(request: Request, api_key: str, what: str) -> None:
    """Without an API key, refuse requests from other machines and from pages in a browser: anybody who reaches the
    port could change the cluster. With a key, it has been checked already. what: the refused action, in words."""
    if api_key:
        return
    host = request.client.host if request.client else ""
    if not is_loopback(host) or "origin" in request.headers:
        raise UnauthenticatedError(
            f"{what} from another machine or a page needs an API key on the router (--api-key)"
        )


def has_other(model: ModelWorkers, worker: WorkerLink) -> bool:
    """Whether the worker's role has another worker of the model that takes requests."""
    return any(link is not worker and link.role == worker.role and link.is_usable for link in model.links)
