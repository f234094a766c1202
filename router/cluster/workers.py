"""The table of all workers: which addresses there are, which workers may be used, what they agree on.

A host name that resolves to several addresses stands for one worker each, and is resolved again every few
seconds. Owns the links and the prefix index; chooses nothing.
"""

from __future__ import annotations

import asyncio
import ipaddress
import logging
import socket
import time
from collections.abc import Callable, Collection
from typing import Any

from common.errors import HandshakeError, UnavailableError
from kvstore.pool.block_hash import block_keys, root_key
from kvstore.pool.index import PrefixIndex
from kvstore.types import WorkerId
from protos import types_pb2 as pb
from router.api.sampling import ModelLimits
from router.cluster.handshake import check_worker
from router.cluster.worker_connection import WorkerConnection
from router.cluster.worker_link import WorkerLink
from router.config import RouterConfig

logger = logging.getLogger(__name__)
RESOLVE_INTERVAL_SECONDS = 3.0
ROLES = ("prefill", "decode")


class WorkerTable:
    """All workers of one router. `start` and `stop` belong to the running event loop."""

    def __init__(self, config: RouterConfig, tokenizer_hash: str) -> None:
        self.index = PrefixIndex()
        self.on_usable: Callable[[], object] = lambda: None  # called when some worker has become usable
        self._config = config
        self._tokenizer_hash = tokenizer_hash
        self._links: dict[tuple[str, str], WorkerLink] = {}
        self._tasks: dict[tuple[str, str], asyncio.Task[None]] = {}
        self._resolver: asyncio.Task[None] | None = None
        self._last_info: pb.WorkerInfo | None = None

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

    def usable(self, role: str, avoid: Collection[WorkerId] = ()) -> list[WorkerLink]:
        """Workers that may get a request. Those to avoid, or whose breaker is open, only when there is no other."""
        now = time.monotonic()
        links = [link for link in self._links.values() if link.role == role and link.is_usable]
        closed = [link for link in links if not link.breaker.is_open(now)]
        preferred = [link for link in closed if link.worker_id not in avoid]
        return preferred or closed or links

    def seconds_absent(self, role: str, now: float) -> float:
        """How long no worker of a role has been attached; infinite when none ever was."""
        links = [link for link in self._links.values() if link.role == role]
        if any(link.info is not None for link in links):
            return 0.0
        return now - (max((link.lost_time for link in links), default=0.0) or float("-inf"))

    def has_other(self, worker: WorkerLink) -> bool:
        """Whether its role has another worker that takes requests."""
        return any(link is not worker and link.role == worker.role and link.is_usable for link in self.links)

    def find(self, worker_id: str) -> WorkerLink | None:
        """The attached worker of that name."""
        return next((link for link in self._links.values() if link.info and link.worker_id == worker_id), None)

    def infos(self) -> list[pb.WorkerInfo]:
        return [link.info for link in self._links.values() if link.info is not None]

    def limits(self, tokenizer_vocab_size: int) -> ModelLimits:
        """Bounds that hold on every worker, or on the last one that was. Raises UnavailableError before the first."""
        infos = self.infos() or ([self._last_info] if self._last_info else [])
        if not infos:
            raise UnavailableError("no worker is available")
        return ModelLimits(
            max_model_len=min(info.max_model_len for info in infos),
            vocab_size=min(tokenizer_vocab_size, min(info.vocab_size for info in infos)),
        )

    def cached_tokens(self, token_ids: list[int], salt: str) -> dict[WorkerId, int]:
        """Leading tokens of a prompt that each worker has in its cache, by the index."""
        infos = self.infos()
        if not infos or not self.index.num_keys:
            return {}
        info = infos[0]
        keys = block_keys(token_ids, info.block_size, root_key(info.model_fingerprint, "", salt))
        return {worker: blocks * info.block_size for worker, blocks in self.index.matches(keys).items()}

    def describe(self) -> list[dict[str, Any]]:
        """Every worker for GET /v1/cluster."""
        now = time.monotonic()
        return [_describe(link, self.index, now) for link in self._links.values()]

    # -- addresses ---------------------------------------------------------------------------------------------

    def _accept(self, link: WorkerLink, info: pb.WorkerInfo) -> None:
        others = [other for other in self._links.values() if other is not link and other.info is not None]
        for other in others:
            if other.worker_id == info.worker_id:
                raise HandshakeError(
                    f"{link.address} and {other.address} both call themselves {info.worker_id}: "
                    "give each worker its own --worker-id"
                )
        check_worker(info, link.role, self._tokenizer_hash, [other.info for other in others if other.info])
        self._last_info = info

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
                self.index.remove_worker(link.worker_id)

    def _add(self, role: str, address: str) -> None:
        link = WorkerLink(role, address, self.index, lambda: self.on_usable())
        connection = WorkerConnection(
            link, self._accept, self._config.cluster_token, self._config.worker_timeout_seconds
        )
        self._links[(role, address)] = link
        self._tasks[(role, address)] = asyncio.create_task(connection.run(), name=f"link {address}")


async def _addresses(host: str, port: int) -> list[str]:
    """`host:port` for each address of `host`; empty when the name does not resolve now."""
    try:
        ipaddress.ip_address(host)
        return [_joined(host, port)]
    except ValueError:
        pass
    try:
        found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except OSError as error:
        logger.debug("cannot resolve %s: %s", host, error)
        return []
    hosts = {str(item[4][0]) for item in found}
    if host == "localhost":  # one machine, however many addresses
        hosts = {"127.0.0.1"} if "127.0.0.1" in hosts else hosts
    return [_joined(item, port) for item in sorted(hosts)]


def _joined(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


_SHOWN_INFO = ("model", "device", "quantization", "cuda_graphs", "version")
_SHOWN_RATES = ("prefill_tokens_per_second", "pull_tokens_per_second", "step_seconds")
_SHOWN_LOAD = {
    "running": "num_running", "waiting": "num_waiting", "swapped": "num_swapped", "loading": "num_loading",
    "leases": "num_leases", "kv_blocks": "kv_blocks_total", "kv_blocks_free": "kv_blocks_free",
    "kv_blocks_cached": "kv_blocks_cached",
}  # fmt: skip


def _describe(link: WorkerLink, index: PrefixIndex, now: float) -> dict[str, Any]:
    fields: dict[str, Any] = {
        "id": link.worker_id,
        "role": link.role,
        "state": _state(link, now),
        "open_requests": link.num_open,
        "times_lost": link.num_lost,
    }
    if link.refused:
        fields["refused"] = link.refused
    if link.info is not None:
        info = link.info
        fields |= {
            **{name: getattr(info, name) for name in _SHOWN_INFO},
            "transports": list(info.transports),
            "load": {shown: getattr(link.load, name) for shown, name in _SHOWN_LOAD.items()},
            "rates": {name: round(getattr(link.rates, name), 6) for name in _SHOWN_RATES},
            "index": {
                "state": index.state(link.worker_id).value,
                "blocks": index.num_worker_keys(link.worker_id),
            },
        }
    return fields


def _state(link: WorkerLink, now: float) -> str:
    if link.refused:
        return "refused"
    if link.info is None:
        return "connecting"
    if link.load.draining:
        return "draining"
    if not link.is_serving:
        return "not_serving"
    return "suspended" if link.breaker.is_open(now) else "ready"
