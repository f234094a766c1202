"""The table of all workers: which addresses there are, and whose model each worker serves.

A host name that resolves to several addresses stands for one worker each, and is resolved again every few
seconds. Owns the connections; chooses nothing.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Sequence

from common.errors import HandshakeError
from common.net.hosts import with_port
from protos import types_pb2 as pb
from router.config import ROLES, RouterConfig
from router.workers.model_workers import ModelWorkers
from router.workers.worker_connection import WorkerConnection
from router.workers.worker_link import WorkerLink

logger = logging.getLogger(__name__)
RESOLVE_INTERVAL_SECONDS = 3.0


class WorkerTable:
    """All workers of one router. `start` and `stop` belong to the running event loop."""

    def __init__(self, config: RouterConfig, models: Sequence[ModelWorkers]) -> None:
        self._config = config
        self._models = models
        self._links: dict[tuple[str, str], WorkerLink] = {}
        self._tasks: dict[tuple[str, str], asyncio.Task[None]] = {}
        self._resolver: asyncio.Task[None] | None = None

    async def start(self) -> None:
        await self._resolve()
        self._resolver = asyncio.create_task(self._resolve_forever())

    async def stop(self) -> None:
        tasks = [*self._tasks.values(), *([self._resolver] if self._resolver else [])]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    # -- what is there -----------------------------------------------------------------------------------------

    @property
    def links(self) -> list[WorkerLink]:
        return list(self._links.values())

    def find(self, worker_id: str) -> WorkerLink | None:
        """The attached worker of that name."""
        return next((link for link in self._links.values() if link.info and link.worker_id == worker_id), None)

    def model_of(self, link: WorkerLink) -> ModelWorkers:
        """The model whose workers a link is among: the first one, until its worker announces another."""
        return next(model for model in self._models if link in model.links)

    # -- addresses ---------------------------------------------------------------------------------------------

    def _accept(self, link: WorkerLink, info: pb.WorkerInfo) -> None:
        others = [other for other in self._links.values() if other is not link and other.info is not None]
        for other in others:
            if other.worker_id == info.worker_id:
                raise HandshakeError(
                    f"{link.address} and {other.address} both call themselves {info.worker_id}: "
                    "give each worker its own --worker-id"
                )
        before, announced = self.model_of(link), self._announced_model(info)
        announced.accept(link, info)
        if announced is not before:
            before.links.remove(link)

    def _announced_model(self, info: pb.WorkerInfo) -> ModelWorkers:
        """The model that a worker announces; the router's only one under any name, as names of files may differ."""
        if len(self._models) == 1:
            return self._models[0]
        for model in self._models:
            if info.model in (model.own_name, model.name):
                return model
        raise HandshakeError(
            f"{info.worker_id} serves {info.model!r}, which is none of this router's models "
            f"({', '.join(model.own_name for model in self._models)}): name it in --models, or start the worker "
            "with one of these"
        )

    async def _resolve_forever(self) -> None:
        while True:
            await asyncio.sleep(RESOLVE_INTERVAL_SECONDS)
            await self._resolve()

    async def _resolve(self) -> None:
        """Bring the links in line with what the configured names resolve to now."""
        wanted: set[tuple[str, str]] = set()
        failed = False
        for role in ROLES:
            for host, port in self._config.addresses(role):
                addresses = await _addresses(host, port)
                failed = failed or not addresses
                wanted |= {(role, address) for address in addresses}
        for key in wanted - self._links.keys():
            self._add(*key)
        for key, link in list(self._links.items()):
            link.is_leaving = key not in wanted and not failed
            if link.is_leaving and not link.num_open:
                self._tasks.pop(key).cancel()
                del self._links[key]
                self.model_of(link).remove(link)

    def _add(self, role: str, address: str) -> None:
        link = self._models[0].add(role, address)
        connection = WorkerConnection(
            link, self._accept, self._config.cluster_token, self._config.worker_timeout_seconds
        )
        self._links[(role, address)] = link
        self._tasks[(role, address)] = asyncio.create_task(connection.run(), name=f"link {address}")


async def _addresses(host: str, port: int) -> list[str]:
    """`host:port` for each address of `host`; empty when the name does not resolve now."""
    try:
        found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except OSError as error:
        logger.debug("cannot resolve %s: %s", host, error)
        return []
    hosts = {str(item[4][0]) for item in found}
    if host == "localhost":  # one machine, however many addresses
        hosts = {"127.0.0.1"} if "127.0.0.1" in hosts else hosts
    return [with_port(item, port) for item in sorted(hosts)]
