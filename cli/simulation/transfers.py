"""KV transfers between workers in simulated time: of computed prompts, or of their parts while the rest is computed.

A pull takes `tokens / rate` seconds; the pulls of a worker run one after the other. Prefetches of prompts that are
still being computed have a separate queue.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from random import Random

from cli.simulation.clock import Clock
from cli.simulation.worker import SimulatedWorker
from engine.progressive_pulls.parts import part_blocks
from engine.request import RequestStatus
from engine.scheduled_step import KvLoad, PromptChunk
from kvstore.types import BlockId


@dataclass(slots=True, eq=False)
class Lease:
    """KV of a prompt, or of a part of it, on the worker that computed it."""

    worker: SimulatedWorker
    blocks: list[BlockId]
    num_tokens: int

    def release(self) -> None:
        self.worker.kv.pool.release(self.blocks)
        self.worker.wake()  # it may have waited for blocks


class Transfers:
    """Transfers between the workers of one cluster."""

    def __init__(
        self, clock: Clock, pull_seconds: float, tokens_per_second: float, hop_seconds: float, seed: int
    ) -> None:
        """pull_seconds: mean time until the first byte.

        Pulls of short prompts by shared memory took 0.4 to 2.6 ms (10% and 90%), 0.8 in the median, as if drawn from
        an exponential distribution. This is about as long as the loop's turn that starts one, so some arrive before
        it plans the next step and some do not, which determines the p99 of gaps.
        """
        self._clock = clock
        self._pull_seconds = pull_seconds
        self._tokens_per_second = tokens_per_second
        self._hop_seconds = hop_seconds
        self._random = Random(seed)

    def pull(self, worker: SimulatedWorker, load: KvLoad) -> None:
        """Fill the load's blocks, then release the source."""
        assert isinstance(load.source, Lease)
        if not load.positions:
            load.source.release()
            return
        is_prefetch = load.owner is None
        seconds = self._random.expovariate(1.0) * self._pull_seconds + load.num_tokens / self._tokens_per_second
        worker.pulls_end[is_prefetch] = end = max(self._clock.now, worker.pulls_end[is_prefetch]) + seconds
        self._clock.at(end, partial(self._pulled, worker, load, load.source, worker.turn_began))

    def _pulled(self, worker: SimulatedWorker, load: KvLoad, lease: Lease, began: float) -> None:
        lease.release()
        worker.finish_load(load, began)

    def offer(self, worker: SimulatedWorker, target: SimulatedWorker, chunk: PromptChunk, num_offered: int) -> int:
        """Offer what a chunk has added to a prompt, as `PartLeases` does; return the blocks offered so far."""
        request, kv = chunk.request, worker.kv
        num_blocks = chunk.num_tokens // kv.block_size
        is_steady = request.status is RequestStatus.RUNNING and not request.num_preemptions
        if not is_steady or num_blocks <= num_offered:
            return num_offered
        kv.prefixes.extend_keys(request)
        blocks = part_blocks(kv, request, num_offered, num_blocks)
        kv.pool.acquire(blocks)
        lease, keys = Lease(worker, blocks, len(blocks) * kv.block_size), request.block_keys[num_offered:num_blocks]
        self._clock.after(2 * self._hop_seconds, partial(target.prefetch, lease, keys))
        return num_blocks
