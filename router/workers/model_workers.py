"""The workers of one model: which are usable, their common limits, and the prefix index of their caches.

A link joins when its worker announces the model, and stays while the worker is disconnected. Opens no connections and
places no requests.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass

from common.errors import HandshakeError, UnavailableError
from kvstore.pool.block_hash import HASH_VERSION, block_keys, root_key
from kvstore.pool.index import PrefixIndex
from kvstore.types import WorkerId
from protos import types_pb2 as pb
from router.workers.worker_link import Meter, WorkerLink

MAX_SHOWN = 64  # characters of a differing value in messages
SAME = "start this model's workers with the same "
# Field of WorkerInfo -> what to do when it differs between workers.
_MUST_AGREE = {
    "model_fingerprint": SAME + "--model, --dtype, --quant-mode and --kv-cache-dtype",
    "tokenizer_hash": "give both the same model",
    "block_size": SAME + "--block-size",
    "hash_version": "run the same version of mini-infer everywhere",
    "kv_layout": SAME + "--model, --dtype and --kv-cache-dtype",
    "kv_dtype": SAME + "--dtype and --kv-cache-dtype",
}


@dataclass(frozen=True, slots=True)
class ModelLimits:
    """Limits that hold on all workers of the model."""

    max_model_len: int
    vocab_size: int


class ModelWorkers:
    """Workers of one model, shared by the model and its adapters."""

    def __init__(self, name: str, own_name: str, tokenizer_hash: str) -> None:
        """name: the model's name for clients; own_name: its name by its files, which workers announce."""
        self.name = name
        self.own_name = own_name
        self.index = PrefixIndex()  # updated by the links
        self.links: list[WorkerLink] = []
        self.new_meter: Callable[[WorkerLink], Meter] = Meter
        self.on_usable: Callable[[], object] = lambda: None  # called when a worker has become usable
        self._tokenizer_hash = tokenizer_hash
        self._last_info: pb.WorkerInfo | None = None

    # -- attached workers --------------------------------------------------------------------------------------

    def usable(self, role: str, avoid: Collection[WorkerId] = ()) -> list[WorkerLink]:
        """Return workers that may get a request; those to avoid, or with an open breaker, only without others."""
        now = time.monotonic()
        links = [link for link in self.links if link.role == role and link.is_usable]
        closed = [link for link in links if not link.breaker.is_open(now)]
        preferred = [link for link in closed if link.worker_id not in avoid]
        return preferred or closed or links

    def seconds_without_decode(self, now: float) -> float:
        """Return the seconds without any attached decode worker; infinite if there never was one."""
        links = [link for link in self.links if link.role == "decode"]
        if any(link.info is not None for link in links):
            return 0.0
        return now - (max((link.lost_time for link in links), default=0.0) or float("-inf"))

    def find(self, worker_id: str) -> WorkerLink | None:
        """Return the attached worker `worker_id`, or None."""
        return next((link for link in self.links if link.info and link.worker_id == worker_id), None)

    def infos(self) -> list[pb.WorkerInfo]:
        return [link.info for link in self.links if link.info is not None]

    # -- limits and caches -------------------------------------------------------------------------------------

    def limits(self, tokenizer_vocab_size: int) -> ModelLimits:
        """Return limits of all workers, or of the last one if all are gone. Raises UnavailableError without any."""
        infos = self.infos() or ([self._last_info] if self._last_info else [])
        if not infos:
            raise UnavailableError("no worker is available")
        return ModelLimits(
            max_model_len=min(info.max_model_len for info in infos),
            vocab_size=min(tokenizer_vocab_size, min(info.vocab_size for info in infos)),
        )

    def cached_tokens(self, packed_ids: bytes, request: pb.Submit) -> dict[WorkerId, int]:
        """Return how many leading tokens of a prompt each worker has in its cache, according to the index."""
        infos = self.infos()
        if not infos or not self.index.num_keys:
            return {}
        info = infos[0]  # all agree on block size and fingerprint
        root = root_key(info.model_fingerprint, request.adapter, request.cache_salt)
        keys = block_keys(root, packed_ids, info.block_size)
        return {worker: blocks * info.block_size for worker, blocks in self.index.matches(keys).items()}

    # -- joining and leaving -----------------------------------------------------------------------------------

    def add(self, role: str, address: str) -> WorkerLink:
        """Add a link to a worker that has not announced its model yet."""
        link = WorkerLink(role, address)
        self._take(link)
        return link

    def accept(self, link: WorkerLink, info: pb.WorkerInfo) -> None:
        """Take the link of a worker that announces this model. Raises HandshakeError when it does not match."""
        others = [other.info for other in self.links if other is not link and other.info is not None]
        check_worker(info, link.listed_role, self._tokenizer_hash, others)
        self._last_info = info
        if link not in self.links:
            self._take(link)

    def remove(self, link: WorkerLink) -> None:
        self.links.remove(link)
        self.index.remove_worker(link.worker_id)

    def _take(self, link: WorkerLink) -> None:
        self.links.append(link)
        link.join(self.index, self.new_meter(link), lambda: self.on_usable())


def check_worker(info: pb.WorkerInfo, role: str, tokenizer_hash: str, others: Iterable[pb.WorkerInfo]) -> None:
    """Raise HandshakeError, which says what differs and how to fix it, when `info` cannot join `others`."""
    if info.role != role:
        raise HandshakeError(f"{info.worker_id} is a {info.role} worker, but is listed under --{role}")
    if info.tokenizer_hash and info.tokenizer_hash != tokenizer_hash:
        raise HandshakeError(
            f"{info.worker_id} has another tokenizer than this router "
            f"({info.tokenizer_hash[:12]} and {tokenizer_hash[:12]}): {_MUST_AGREE['tokenizer_hash']}"
        )
    if info.hash_version != HASH_VERSION:
        raise HandshakeError(
            f"{info.worker_id} computes block keys by version {info.hash_version}, this router by version "
            f"{HASH_VERSION}: {_MUST_AGREE['hash_version']}"
        )
    if info.max_model_len < 2 or info.vocab_size < 1 or info.block_size < 1:
        raise HandshakeError(f"{info.worker_id} describes itself with impossible sizes: restart or update it")
    for other in others:
        for name, remedy in _MUST_AGREE.items():
            mine, theirs = getattr(info, name), getattr(other, name)
            if mine != theirs:
                raise HandshakeError(
                    f"{name} differs: {info.worker_id} has {str(mine)[:MAX_SHOWN]!r}, {other.worker_id} has "
                    f"{str(theirs)[:MAX_SHOWN]!r}: {remedy}"
                )
