"""The policy's view of workers and of a request, and the candidates that it chooses among. Plain data."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from common.step_times import StepCost
from kvstore.types import WorkerId
from router.journal import Placement

EXPECTED_TOKENS = 64  # of an answer, before any is measured
# Of a worker, before any is measured.
DEFAULT_PREFILL_TOKENS_PER_SECOND = 2_000.0
DEFAULT_PULL_TOKENS_PER_SECOND = 100_000.0
DEFAULT_STEP_SECONDS = 0.02
UNMEASURED = StepCost()
ADAPTER_SECONDS = 0.05  # for a worker to read an adapter
KV_PRESSURE_START = 0.9  # share of KV blocks in use above which a worker costs more


@dataclass(frozen=True, slots=True)
class WorkerView:
    """The policy's view of one worker."""

    worker_id: WorkerId
    # Its backlog.
    num_running: int = 0
    num_waiting: int = 0
    num_rows: int = 0  # requests that decode there or will; on a prefill worker the requests that it keeps
    context_tokens: int = 0  # of these requests
    queued_prefill_tokens: int = 0
    queued_prefill_pairs: float = 0.0  # of these tokens: each with every token before it
    # Its capacity.
    num_slots: int = 64  # requests that it can run at once: fewer than the batch may have if KV blocks are the limit
    kv_used_share: float = 0.0
    # Its speed; 0: not measured yet.
    step: StepCost = UNMEASURED  # time of a step by its contents
    token_seconds: float = 0.0  # time of a step, as measured from answers
    pull_tokens_per_second: float = 0.0
    is_forgotten: bool = False  # its rates are old, and it is idle
    # Prompts that came recently.
    prompt_tokens_per_second: float = 0.0
    prompt_pairs_per_second: float = 0.0
    prompts_per_second: float = 0.0  # 0: not known

    @property
    def load(self) -> int:
        return self.num_running + self.num_waiting

    @property
    def kv_pressure(self) -> float:
        """0 while KV blocks are plenty, 1 when all are in use."""
        return max(0.0, self.kv_used_share - KV_PRESSURE_START) / (1 - KV_PRESSURE_START)

    def slot_seconds(self, expected_tokens: float, step_seconds: float) -> float:
        """Predict the wait for a slot of one more request: requests ahead of it end first, `num_slots` at a time."""
        slots = max(self.num_slots, 1)
        ahead = max(0, self.load + 1 - slots)
        return ahead * expected_tokens * max(self.token_seconds, step_seconds) / slots


@dataclass(frozen=True, slots=True)
class RequestView:
    """The policy's view of one request. `draw` is uniform in [0, 1); `turn` counts decisions."""

    num_tokens: int
    cached_tokens: Mapping[WorkerId, int]  # by the prefix index
    expected_tokens: float = EXPECTED_TOKENS  # of its answer
    session: str = ""
    draw: float = 0.0
    turn: int = 0
    lacking_adapter: frozenset[WorkerId] = frozenset()  # workers that must read its adapter first

    def cached_on(self, worker: WorkerView) -> int:
        """Tokens in the worker's cache. The last token is always computed, since sampling needs its logits."""
        return min(self.cached_tokens.get(worker.worker_id, 0), self.num_tokens - 1)

    def drawn(self, candidates: Sequence[Candidate]) -> Candidate:
        """Draw one of the candidates at random."""
        return candidates[min(int(self.draw * len(candidates)), len(candidates) - 1)]


@dataclass(frozen=True, slots=True)
class Candidate(Placement):
    """A placement with its predicted cost."""

    cost: float
    terms: Mapping[str, float]  # seconds
    load: int
    is_measured: bool  # whether the terms come from measured rates
    is_kept: bool = False  # `decode` is a prefill worker
    ttft_seconds: float = 0.0  # predicted
    itl_seconds: float = 0.0
    violation: float = 0.0  # by how much objectives are predicted to be missed, as a share of them

    @property
    def kind(self) -> str:
        return "kept" if self.is_kept else super(Candidate, self).kind
