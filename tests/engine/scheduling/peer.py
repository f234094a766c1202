"""A worker that computes prompts, and what pulls their KV from it, for tests of one engine."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

from common.token_ids import pack_ids
from engine.engine import Engine
from engine.request import Request, RequestId, SamplingParams
from engine.scheduled_step import KvLoad
from kvstore.pool.block_hash import block_keys, root_key
from tests.engine.fakes import BlockMemoryRunner, expected_tokens
from tests.engine.scheduling.engines import BLOCK, assert_quiet, make_engine, run_all

PROMPT = list(range(1, 23))  # five full blocks, and two tokens


class Peer:
    """Stands for the worker that computes prompts, and for the puller between it and `engine`.

    The KV source of a prompt is the prompt itself; that of a part is the part's tokens.
    """

    def __init__(self, engine: Engine, runner: BlockMemoryRunner) -> None:
        self.engine = engine
        self._runner = runner
        self.num_copies_out = 0  # of the last step
        self.loads: list[KvLoad] = []
        self.prefetches: list[KvLoad] = []
        self.num_skipped = self.num_early = 0

    def offer(self, prompt: Sequence[int], first: int, last: int) -> None:
        """Offer blocks [first, last) of a prompt as computed."""
        keys = block_keys(root_key("test"), pack_ids(list(prompt)), BLOCK)[:last]
        remote_kv: Any = self.engine.remote_kv
        remote_kv.prefetch(list(prompt[first * BLOCK : last * BLOCK]), keys[first:])

    def submit(self, prompt: Sequence[int], max_tokens: int = 5) -> Request:
        """Submit a request whose whole prompt the peer has computed."""
        return self.engine.add_request(
            prompt,
            SamplingParams(max_tokens=max_tokens),
            output_token_ids=expected_tokens(list(prompt), 1),
            kv_source=list(prompt),
            num_source_tokens=len(prompt),
        )

    def step(self) -> dict[RequestId, list[int]]:
        """Take one turn of a worker's loop. Loads that need not wait for steps are filled before these run."""
        outcome = self.engine.step(partial(self._start, is_early=True))
        self.num_copies_out = len(outcome.plan.copies_out)
        self._start(outcome.loads, is_early=False)
        return {output.request.request_id: output.new_token_ids for output in outcome.outputs}

    def _start(self, jobs: Sequence[KvLoad], is_early: bool) -> None:
        for job in jobs:
            if not job.positions:
                self.num_skipped += job.owner is None
                continue
            self.num_early += is_early
            (self.prefetches if job.owner is None else self.loads).append(job)
            if not is_early:
                self._runner.catch_up()
            self._fill(job, True)

    def finish(self, job: KvLoad, ok: bool = True) -> None:
        (self.prefetches if job.owner is None else self.loads).remove(job)
        if not ok:
            self._fill(job, ok)
        self.engine.finish_load(job, ok)

    def prefetch(self, prompt: Sequence[int], first: int, last: int) -> None:
        """Offer a part, and pull it at once."""
        self.offer(prompt, first, last)
        self.step()
        [job] = self.prefetches
        self.finish(job)

    def _fill(self, job: KvLoad, ok: bool) -> None:
        assert isinstance(job.source, list)
        for position, block_id in zip(job.positions, job.block_ids, strict=True):
            cells = job.source[position * BLOCK : (position + 1) * BLOCK]
            self._runner.blocks[block_id] = [*cells, *([None] * (BLOCK - len(cells)))] if ok else [None] * BLOCK


def make_peer(num_blocks: int = 32, **options: object) -> Peer:
    return Peer(*make_engine(num_blocks, **options))  # type: ignore[arg-type]


def load_rest(peer: Peer, request: Request, positions: list[int]) -> None:
    """Load the missing blocks in a step; then the request is answered."""
    peer.step()
    [job] = peer.loads
    assert job.positions == positions
    peer.finish(job)
    finish(peer, request)


def finish(peer: Peer, request: Request, prompt: Sequence[int] = PROMPT) -> None:
    run_all(peer.engine)
    num_tokens = len(request.output_token_ids)
    assert request.output_token_ids == expected_tokens(list(prompt), num_tokens)
    assert num_tokens == request.params.max_tokens
    assert_quiet(peer.engine)
