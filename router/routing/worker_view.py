"""The policy's view of a worker, from its last report and the router's own count of its backlog. Pure.

Reports lack what is on its way, so each size is the larger one of the report and the router's count.
"""

from __future__ import annotations

from dataclasses import dataclass

from common.pairs import num_pairs
from kvstore.types import WorkerId
from protos import types_pb2 as pb
from router.routing.rates import WorkerRates
from router.routing.views import WorkerView

KV_BOUND_SHARE = 0.9  # share of KV blocks in use above which, while requests wait, the batch cannot grow


@dataclass(slots=True, eq=False)
class Work:
    """The work that a leg gives its worker."""

    num_prompt_tokens: int
    pending_tokens: int  # prompt tokens that count as queued on the worker until the leg's first delta
    decodes: bool  # a row in the worker's steps, now or soon

    @property
    def pairs(self) -> float:
        return num_pairs(self.num_prompt_tokens - self.pending_tokens, self.pending_tokens)


@dataclass(slots=True)
class Backlog:
    """The work given to a worker that it has not reported as done, as the router counts it: prompts and rows.

    A pair is a prompt token with one token before it (`common/pairs.py`).
    """

    num_rows: int = 0  # legs that decode here
    context_tokens: int = 0  # of their prompts
    expected_tokens: int = 0  # prompt tokens of choices that will come here when their leg on another worker ends
    _tokens: int = 0  # to compute, of legs before their first token
    _pairs: float = 0.0
    _done_tokens: int = 0  # of these, by the worker's reports
    _done_pairs: float = 0.0

    @property
    def prompt_tokens(self) -> int:
        return max(self._tokens - self._done_tokens, 0)

    @property
    def prompt_pairs(self) -> float:
        return max(self._pairs - self._done_pairs, 0.0)

    def add(self, work: Work) -> None:
        if work.decodes:
            self.num_rows += 1
            self.context_tokens += work.num_prompt_tokens
        self._tokens += work.pending_tokens
        self._pairs += work.pairs

    def computed(self, num_tokens: int, pairs: float) -> None:
        """Count the prompt tokens and pairs that a step has computed."""
        if self._tokens:
            self._done_tokens += num_tokens
            self._done_pairs += pairs

    def settle(self, work: Work) -> None:
        """Remove a leg's prompt, which is computed or no longer wanted."""
        if not work.pending_tokens:
            return
        pairs = work.pairs
        self._tokens -= work.pending_tokens
        self._pairs -= pairs
        self._done_tokens = max(self._done_tokens - work.pending_tokens, 0) if self._tokens else 0
        self._done_pairs = max(self._done_pairs - pairs, 0.0) if self._tokens else 0.0
        work.pending_tokens = 0

    def remove(self, work: Work) -> None:
        if work.decodes:
            self.num_rows -= 1
            self.context_tokens -= work.num_prompt_tokens
        self.settle(work)


def worker_view(
    worker_id: WorkerId, role: str, max_num_seqs: int, load: pb.LoadReport, rates: WorkerRates, backlog: Backlog,
    num_legs: int, num_expected: int, now: float,
) -> WorkerView:  # fmt: skip
    """Return the view of a worker with `num_legs` open legs, where `num_expected` more choices will come."""
    arrived_tokens, arrived_pairs, num_arrived = rates.arrivals(now)
    num_decoding, context_tokens = (load.num_running, load.context_tokens) if role == "decode" else (0, 0)
    num_used = load.kv_blocks_total - load.kv_blocks_free - load.kv_blocks_cached
    kv_used_share = num_used / load.kv_blocks_total if load.kv_blocks_total else 0.0
    is_kv_bound = kv_used_share > KV_BOUND_SHARE and load.num_waiting + load.num_swapped > 0
    return WorkerView(
        worker_id=worker_id,
        num_running=max(load.num_running, num_legs - load.num_waiting),
        num_waiting=load.num_waiting + load.num_loading + load.num_swapped + num_expected,
        num_rows=max(num_decoding, backlog.num_rows) + num_expected,
        context_tokens=max(context_tokens, backlog.context_tokens) + backlog.expected_tokens,
        queued_prefill_tokens=max(load.waiting_prefill_tokens, backlog.prompt_tokens),
        queued_prefill_pairs=max(load.waiting_prefill_pairs, backlog.prompt_pairs),
        num_slots=min(max(load.num_running, 1), max_num_seqs) if is_kv_bound else max_num_seqs,
        kv_used_share=kv_used_share,
        step=rates.step_times.cost,
        token_seconds=rates.token_seconds,
        pull_tokens_per_second=rates.pull_tokens_per_second,
        is_forgotten=not num_legs and rates.are_old(now),
        prompt_tokens_per_second=arrived_tokens,
        prompt_pairs_per_second=arrived_pairs,
        prompts_per_second=num_arrived,
    )
