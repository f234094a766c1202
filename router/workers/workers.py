"""The table of all workers: their addresses, and the model that each one serves.

Owns the connections; places no requests. `router/discovery` resolves host names to addresses, and
`router/several_models` serves more than one model.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence, Set

from common.errors import HandshakeError
from common.net.hosts import with_port
from common.wings import has_wing
from protos import types_pb2 as pb
from router.config import ROLES, RouterConfig
from router.workers.model_workers import ModelWorkers
from router.workers.worker_connection import WorkerConnection
from router.workers.worker_link import WorkerLink

HAS_DISCOVERY = has_wing("router.discovery")
if HAS_DISCOVERY:
    from router.discovery.names import follow_names, resolved

Key = tuple[str, str]  # role, host:port


class WorkerTable:
    """All workers of one router. Call `start` and `stop` in the event loop that serves."""

    def __init__(self, config: RouterConfig, models: Sequence[ModelWorkers]) -> None:
        self._config = config
        self._models = models
        self._links: dict[Key, WorkerLink] = {}
        self._tasks: dict[Key, asyncio.Task[None]] = {}
        self._resolver: asyncio.Task[None] | None = None

    async def start(self) -> None:
        names = [(role, host, port) for role in ROLES for host, port in self._config.addresses(role)]
        if HAS_DISCOVERY:
            self.set_addresses(*await resolved(names))
            self._resolver = asyncio.create_task(follow_names(names, self.set_addresses))
        else:
            self.set_addresses({(role, with_port(host, port)) for role, host, port in names})

    async def stop(self) -> None:
        tasks = [*self._tasks.values(), *([self._resolver] if self._resolver else [])]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    # -- links -------------------------------------------------------------------------------------------------

    @property
    def links(self) -> list[WorkerLink]:
        return list(self._links.values())

    def find(self, worker_id: str) -> WorkerLink | None:
        """Return the attached worker `worker_id`, or None."""
        return next((link for link in self._links.values() if link.info and link.worker_id == worker_id), None)

    def model_of(self, link: WorkerLink) -> ModelWorkers:
        """Return the model that a link belongs to: the first one, until its worker announces another."""
        return next(model for model in self._models if link in model.links)

    # -- addresses ---------------------------------------------------------------------------------------------

    def _accept(self, link: WorkerLink, info: pb.WorkerInfo) -> None:
        if (other := self.find(info.worker_id)) is not None:  # not `link` itself, which is not attached yet
            raise HandshakeError(
                f"{link.address} and {other.address} both call themselves {info.worker_id}: "
                "give each worker its own --worker-id"
            )
        self._announced_model(info).accept(link, info)

    def _announced_model(self, info: pb.WorkerInfo) -> ModelWorkers:
        """Return the model that a worker announces: here the only one, whatever name its files have elsewhere."""
        return self._models[0]

    def set_addresses(self, wanted: Set[Key], are_all: bool = True) -> None:
        """Open links to these workers. are_all: remove all others, those with open legs at a later call."""
        for key in wanted - self._links.keys():
            self._add(*key)
        for key, link in list(self._links.items()):
            link.is_leaving = are_all and key not in wanted
            if link.is_leaving and not link.num_open:
                self._tasks.pop(key).cancel()
                del self._links[key]
                self.model_of(link).remove(link)

    def _add(self, role: str, address: str) -> None:
        link = self._models[0].add(role, address)
        connection = WorkerConnection(link, self._accept, self._config)
        self._links[(role, address)] = link
        self._tasks[(role, address)] = asyncio.create_task(connection.run(), name=f"link {address}")
