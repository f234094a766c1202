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

from common.step_times import StepCost, chunk_bounds
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
MAX_CHUNK_TOKENS = 8192  # of a step without decode rows; what a worker really takes matters little
SAME_VIOLATION = 0.05  # differences below are noise
HARM = 3.0  # of a delay that makes gaps as long as the objective, beside a wait for a first token
SHORT_QUEUE = 0.05  # seconds of prompts on a prefill worker, up to which it counts as idle
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
    """Every placement. A prefill worker with a queue, or more streams than decode workers have, keeps nothing."""
    predict = Predictor(request, [*prefill, *decode], objectives, local_prefill_tokens)
    candidates = [predict.disaggregated(first, second) for second in decode for first in prefill]
    candidates += [predict.whole(worker, is_kept=False) for worker in decode]
    fewest = min(worker.num_rows for worker in decode)
    for worker in prefill:
        if worker.num_rows < fewest and predict.prompt_seconds(worker, worker.queued_prefill_tokens) < SHORT_QUEUE:
            candidates.append(predict.whole(worker, is_kept=True))
    return candidates


def admissible(candidates: Sequence[Candidate]) -> list[Candidate]:
    """Select the placements that keep the objectives, or miss them least, and of these the cheapest kind."""
    least = min(candidate.violation for candidate in candidates)
    limit = 0.0 if least == 0 else least + SAME_VIOLATION
    kept = [candidate for candidate in candidates if candidate.violation <= limit]
    kind = min(kept, key=lambda candidate: candidate.cost).kind
    return [candidate for candidate in kept if candidate.kind == kind]


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
        itl = max(self.gap_seconds(second, 1), terms["slot"])  # its first token has come when it waits for a seat
        return self._candidate(second, first, False, terms, cached, ttft, itl)

    def whole(self, worker: WorkerView, is_kept: bool) -> Candidate:
        """Prompt and decode on one worker, the prompt in as small chunks as TTFT allows."""
        cached = _cached(self._request, worker)
        num_new = self._request.num_tokens - cached
        decode = self._decode_terms(worker)
        for chunk in self._chunks(worker, worker.num_rows):
            prompt = self._first_token(worker, num_new, chunk)
            ttft = prompt["queue"] + prompt["compute"] + decode["slot"]
            if ttft <= TTFT_MARGIN * (self._objectives.ttft or math.inf):
                break
        cost = self._costs[worker.worker_id]
        num_felt = max(num_new - self._free_tokens, 0)
        num_beside = worker.queued_prefill_tokens + num_felt if worker.num_rows else 0
        gap = cost.seconds(worker.num_rows + 1, min(chunk, num_beside))
        steps_seconds = num_felt * cost.prompt_token + math.ceil(num_felt / chunk) * cost.prompt
        terms = prompt | decode | {"disturbance": self._harm(gap) * worker.num_rows * steps_seconds}
        if is_kept:
            terms["disturbance"] += self._request.expected_tokens * self.interruption_seconds(worker, 1)
        itl = max(gap, self.gap_seconds(worker, 1))
        return self._candidate(worker, None, is_kept, terms, cached, ttft, itl)

    def _harm(self, gap: float) -> float:
        """What a delay counts for that makes gaps so long: little while they are far below the objective."""
        return HARM * min(gap / self._objectives.itl, 1.0) ** 3 if self._objectives.itl else 1.0

    # -- parts, which moves use too ------------------------------------------------------------------------------

    def decode_seconds(self, worker: WorkerView, num_more: int) -> float:
        """Mean time between tokens on a worker with so many rows more, prompts that come there included."""
        num_rows = worker.num_rows + num_more
        cost = self._costs[worker.worker_id]
        step = cost.seconds(num_rows)
        return step + self.prompt_share(worker) * (cost.seconds(num_rows, self._chunks(worker, num_rows)[0]) - step)

    def interruption_seconds(self, worker: WorkerView, num_more: int, share: float = 0.0) -> float:
        """What prompts that a prefill worker computes at once do to each token of a row there, weighed.

        share: of its time that they take, if it is more than lately.
        """
        num_rows = worker.num_rows + num_more
        cost = self._costs[worker.worker_id]
        gap = cost.seconds(num_rows, self._chunks(worker, num_rows)[1])
        return self._harm(gap) * max(self.prompt_share(worker), share) * (gap - cost.seconds(num_rows))

    def gap_seconds(self, worker: WorkerView, num_more: int) -> float:
        """The time between tokens that one in a hundred exceeds."""
        num_rows = worker.num_rows + num_more
        chunk = self._chunks(worker, num_rows)[0]
        if self.prompt_share(worker) < FEW:
            chunk = min(chunk, worker.queued_prefill_tokens)
        return self._costs[worker.worker_id].seconds(num_rows, chunk)

    def prompt_share(self, worker: WorkerView) -> float:
        """Share of a worker's time that the prompts take which come there."""
        return min(worker.prompt_tokens_per_second * self._costs[worker.worker_id].prompt_token, 1.0)

    def prompt_seconds(self, worker: WorkerView, num_tokens: int, chunk: int = 0) -> float:
        """Time to compute so many prompt tokens beside the rows that decode there; chunk 0: the largest."""
        cost, num_rows = self._costs[worker.worker_id], worker.num_rows
        num_steps = math.ceil(num_tokens / (chunk or self._chunks(worker, num_rows)[1]))
        return num_tokens * cost.prompt_token + num_steps * (cost.seconds(num_rows) + cost.prompt)

    def pull_seconds(self, worker: WorkerView, num_tokens: int) -> float:
        return num_tokens / (worker.pull_tokens_per_second or self._pull_rate)

    def crowding_seconds(self, worker: WorkerView) -> float:
        """What one more row takes from those that are there, each step."""
        return worker.num_rows * self._costs[worker.worker_id].row

    def _chunks(self, worker: WorkerView, num_rows: int) -> tuple[int, int]:
        """Prompt tokens beside so many decode rows, as the worker bounds them: without risk, and at most."""
        if not self._objectives.itl or not num_rows:
            return MAX_CHUNK_TOKENS, MAX_CHUNK_TOKENS
        gentle, most = chunk_bounds(self._costs[worker.worker_id], self._objectives.itl, num_rows)
        return min(gentle, MAX_CHUNK_TOKENS), min(most, MAX_CHUNK_TOKENS)

    def _first_token(self, worker: WorkerView, num_new: int, chunk: int = 0) -> dict[str, float]:
        queued = worker.queued_prefill_tokens
        queue = self.prompt_seconds(worker, queued, chunk)
        return {"queue": queue, "compute": self.prompt_seconds(worker, queued + num_new, chunk) - queue}

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
    decoding = [w.step for w in workers if w.step.base]
    computing = [w.step for w in workers if w.step.prompt_token]
    base, row = _mean([c.base for c in decoding], DEFAULT_STEP_SECONDS), _mean([c.row for c in decoding], 0.0)
    prompt = _mean([c.prompt for c in computing], 0.0)
    token = _mean([c.prompt_token for c in computing], 1 / DEFAULT_PREFILL_TOKENS_PER_SECOND)
    return {
        w.worker_id: StepCost(
            *((w.step.base, w.step.row) if w.step.base else (base, row)),
            *((w.step.prompt, w.step.prompt_token) if w.step.prompt_token else (prompt, token)),
        )
        for w in workers
    }


def _mean(values: Sequence[float], default: float) -> float:
    return sum(values) / len(values) if values else default


def _cached(request: RequestView, worker: WorkerView) -> int:
    # The last token is always computed: sampling needs its logits.
    return min(request.cached_tokens.get(worker.worker_id, 0), request.num_tokens - 1)
