"""Placements of a request under latency objectives: which workers compute and decode it. Pure.

A worker's role is a preference. A request may be

    disaggregated  a prefill worker computes the prompt, a decode worker the rest
    local          a decode worker does both, the prompt in chunks that keep the ITL objective of its streams
    kept           a prefill worker does both; a move to a decode worker may follow

For each of them time to first token and time between tokens are predicted from measured rates:

    TTFT = (tokens queued + own uncached tokens) * prompt token + steps they are spread over * decode step
    ITL  = decode step, with a chunk of a prompt beside it where prompts come

Among those that keep both objectives the cheapest is taken, else the one that misses them least. The cost is in
seconds that this request and those it disturbs lose: TTFT, the pull, a seat, own tokens, and the time that a local
prompt and one more row take from each row that is there.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from common.step_times import StepCost
from router.cluster.prediction import (
    DEFAULT_PREFILL_TOKENS_PER_SECOND,
    DEFAULT_PULL_TOKENS_PER_SECOND,
    DEFAULT_STEP_SECONDS,
    KV_PRESSURE_START,
    Candidate,
    RequestView,
    WorkerView,
)

TTFT_MARGIN = 0.5  # share of the objective that predictions may use: they miss what arrives later
ITL_MARGIN = 0.9
MAX_CHUNK_TOKENS = 8192  # of a step without decode rows; what a worker really takes matters little
MIN_CHUNK_TOKENS = 64  # a prompt advances by so many tokens a step whatever the objective says
SAME_VIOLATION = 0.05  # differences below are noise
FEW = 0.01  # share of disturbed steps that a 99th percentile does not see


@dataclass(frozen=True, slots=True)
class Objectives:
    """Seconds; 0: none."""

    ttft: float = 0.0
    itl: float = 0.0

    def __bool__(self) -> bool:
        return bool(self.ttft or self.itl)

    def violation(self, ttft: float, itl: float) -> float:
        """By how much predictions miss the objectives, as a share of them; 0: both are kept."""
        late = max(ttft / (TTFT_MARGIN * self.ttft) - 1.0, 0.0) if self.ttft else 0.0
        return late + (max(itl / self.itl - 1.0, 0.0) if self.itl else 0.0)


def placements_for(
    request: RequestView,
    prefill: Sequence[WorkerView],
    decode: Sequence[WorkerView],
    local_prefill_tokens: int,
    objectives: Objectives,
) -> list[Candidate]:
    """Every placement. A prefill worker with a queue keeps nothing."""
    predict = Predictor(request, [*prefill, *decode], objectives, local_prefill_tokens)
    candidates = [predict.disaggregated(first, second) for second in decode for first in prefill]
    candidates += [predict.whole(worker, is_kept=False) for worker in decode]
    candidates += [predict.whole(worker, is_kept=True) for worker in prefill if not worker.queued_prefill_tokens]
    return candidates


def admissible(candidates: Sequence[Candidate]) -> list[Candidate]:
    """Those that keep the objectives; when none does, those that miss them least."""
    least = min(candidate.violation for candidate in candidates)
    limit = 0.0 if least == 0 else least + SAME_VIOLATION
    return [candidate for candidate in candidates if candidate.violation <= limit]


class Predictor:
    """Predictions for one request; a worker without measurements gets the mean of the others, or defaults."""

    def __init__(
        self,
        request: RequestView,
        workers: Sequence[WorkerView],
        objectives: Objectives,
        local_prefill_tokens: int = 0,
    ) -> None:
        self._request = request
        self._objectives = objectives
        self._free_tokens = local_prefill_tokens  # so few beside decode rows delay nobody
        self._costs = _complete_costs(workers)
        pulls = [worker.pull_tokens_per_second for worker in workers if worker.pull_tokens_per_second]
        self._pull_rate = sum(pulls) / len(pulls) if pulls else DEFAULT_PULL_TOKENS_PER_SECOND

    def disaggregated(self, first: WorkerView, second: WorkerView) -> Candidate:
        """Prompt on `first`, decode on `second`."""
        request = self._request
        cached = _cached(request, first)
        terms = self._first_token(first, request.num_tokens - cached)
        ttft = sum(terms.values())
        terms["pull"] = self.pull_seconds(second, request.num_tokens - _cached(request, second))
        terms |= self._decode_terms(second)
        return self._candidate(second, first, False, terms, cached, ttft, self.gap_seconds(second, 1))

    def whole(self, worker: WorkerView, is_kept: bool) -> Candidate:
        """Prompt and decode on one worker."""
        cached = _cached(self._request, worker)
        num_new = self._request.num_tokens - cached
        terms = self._first_token(worker, num_new) | self._decode_terms(worker)
        ttft = terms["queue"] + terms["compute"] + terms["slot"]
        cost = self._costs[worker.worker_id]
        num_felt = max(num_new - self._free_tokens, 0)
        terms["disturbance"] = worker.num_rows * num_felt * cost.prompt_token
        itl = self.gap_seconds(worker, 1, num_felt)
        return self._candidate(worker, None, is_kept, terms, cached, ttft, itl)

    # -- parts, which moves use too ------------------------------------------------------------------------------

    def decode_seconds(self, worker: WorkerView, num_more: int) -> float:
        """Mean time between tokens on a worker with so many rows more, prompts that come there included."""
        num_rows = worker.num_rows + num_more
        cost = self._costs[worker.worker_id]
        step = cost.seconds(num_rows)
        mixed = step + self._chunk(worker, num_rows) * cost.prompt_token
        return step + self.prompt_share(worker) * (mixed - step)

    def gap_seconds(self, worker: WorkerView, num_more: int, num_prompt_tokens: int = 0) -> float:
        """The time between tokens that one in a hundred exceeds."""
        num_rows = worker.num_rows + num_more
        cost = self._costs[worker.worker_id]
        num_coming = worker.queued_prefill_tokens + num_prompt_tokens
        chunk = self._chunk(worker, num_rows)
        if self.prompt_share(worker) < FEW:
            chunk = min(chunk, num_coming)
        return cost.seconds(num_rows, chunk)

    def prompt_share(self, worker: WorkerView) -> float:
        """Share of a worker's time that the prompts take which come there."""
        return min(worker.prompt_tokens_per_second * self._costs[worker.worker_id].prompt_token, 1.0)

    def queue_seconds(self, worker: WorkerView, num_new: int = 0) -> float:
        """Time until queued prompts and `num_new` tokens more are computed, beside the rows that decode there."""
        cost, num_rows = self._costs[worker.worker_id], worker.num_rows
        num_tokens = worker.queued_prefill_tokens + num_new
        num_steps = math.ceil(num_tokens / self._chunk(worker, num_rows)) if num_rows else 0
        return num_tokens * cost.prompt_token + num_steps * cost.seconds(num_rows)

    def pull_seconds(self, worker: WorkerView, num_tokens: int) -> float:
        return num_tokens / (worker.pull_tokens_per_second or self._pull_rate)

    def crowding_seconds(self, worker: WorkerView) -> float:
        """What one more row takes from those that are there, each step."""
        return worker.num_rows * self._costs[worker.worker_id].row

    def _chunk(self, worker: WorkerView, num_rows: int) -> int:
        """Prompt tokens beside so many decode rows, as the worker bounds them."""
        if not self._objectives.itl:
            return MAX_CHUNK_TOKENS
        cost = self._costs[worker.worker_id]
        within = cost.prompt_tokens_within(ITL_MARGIN * self._objectives.itl, num_rows)
        return min(max(within, MIN_CHUNK_TOKENS), MAX_CHUNK_TOKENS)

    def _first_token(self, worker: WorkerView, num_new: int) -> dict[str, float]:
        queue = self.queue_seconds(worker)
        return {"queue": queue, "compute": self.queue_seconds(worker, num_new) - queue}

    def _decode_terms(self, worker: WorkerView) -> dict[str, float]:
        expected, cost = self._request.expected_tokens, self._costs[worker.worker_id]
        step = self.decode_seconds(worker, 1)
        pressure = max(0.0, worker.kv_used_share - KV_PRESSURE_START) / (1 - KV_PRESSURE_START)
        slots = max(worker.num_slots, 1)
        ahead = max(0, worker.load + 1 - slots)  # each of them ends before this one starts, `slots` at a time
        return {
            "slot": ahead * expected * max(worker.token_seconds, cost.seconds(1)) / slots,
            "decode": expected * step * (1 + pressure),
            "crowding": expected * self.crowding_seconds(worker),
        }

    def _candidate(
        self,
        decode: WorkerView,
        prefill: WorkerView | None,
        is_kept: bool,
        terms: dict[str, float],
        cached: int,
        ttft: float,
        itl: float,
    ) -> Candidate:
        computing = prefill or decode
        return Candidate(
            decode=decode.worker_id,
            prefill=prefill.worker_id if prefill else None,
            cost=sum(terms.values()),
            terms=terms,
            cached_tokens=cached,
            load=decode.load + (prefill.load if prefill else 0),
            is_measured=bool(computing.step.prompt_token and (decode.step.base or decode.step.prompt_token)),
            is_kept=is_kept,
            ttft_seconds=ttft,
            itl_seconds=itl,
            violation=self._objectives.violation(ttft, itl),
        )


def _complete_costs(workers: Sequence[WorkerView]) -> dict[str, StepCost]:
    """Step costs with what is not measured filled in: a prefill worker that never decodes, a decode worker before
    its first prompt."""
    base = _mean([w.step.base for w in workers], DEFAULT_STEP_SECONDS)
    row = _mean([w.step.row for w in workers if w.step.base], 0.0)
    token = _mean([w.step.prompt_token for w in workers], 1 / DEFAULT_PREFILL_TOKENS_PER_SECOND)
    return {
        w.worker_id: StepCost(w.step.base or base, w.step.row if w.step.base else row, w.step.prompt_token or token)
        for w in workers
    }


def _mean(values: Sequence[float], default: float) -> float:
    known = [value for value in values if value > 0]
    return sum(known) / len(known) if known else default


def _cached(request: RequestView, worker: WorkerView) -> int:
    # The last token is always computed: sampling needs its logits.
    return min(request.cached_tokens.get(worker.worker_id, 0), request.num_tokens - 1)
