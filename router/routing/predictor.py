"""The router's cost model: predicts the cost of a placement from learned step costs. Pure.

    TTFT = work of the queued prompts and its own + number of steps for it * decode step

The cost is the time, in seconds, that this request and the requests it delays lose: TTFT, pull, wait for a slot, its
tokens, and the delay of other rows by a local prompt and by one more row. There are no objectives to miss here:
prompts run as fast as possible, and all delays count alike. `router/objectives` overrides this.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from common.pairs import num_pairs
from common.step_times import StepCost
from router.routing.views import (
    ADAPTER_SECONDS,
    DEFAULT_PREFILL_TOKENS_PER_SECOND,
    DEFAULT_PULL_TOKENS_PER_SECOND,
    DEFAULT_STEP_SECONDS,
    Candidate,
    RequestView,
    WorkerView,
)

MAX_CHUNK_TOKENS = 8192  # of a step; the worker's actual limit matters little
MOST_DISTURBED = 16  # most rows whose delay by a local prompt counts: with more it would wait too long


class Predictor:
    """Predictions for one request. A worker without measurements gets the mean of the others, or defaults."""

    def __init__(self, request: RequestView, workers: Sequence[WorkerView], local_prefill_tokens: int = 0) -> None:
        self._request = request
        self._free_tokens = local_prefill_tokens  # so few prompt tokens in decode steps delay no rows
        self._costs = _complete_costs(workers)
        pulls = [worker.pull_tokens_per_second for worker in workers if worker.pull_tokens_per_second]
        self._pull_rate = sum(pulls) / len(pulls) if pulls else DEFAULT_PULL_TOKENS_PER_SECOND

    def disaggregated(self, prefill: Sequence[WorkerView], decode: Sequence[WorkerView]) -> list[Candidate]:
        """Predict every pair of a prefill worker and a decode worker."""
        request = self._request
        firsts = [(w, self._first_token(w, request.num_tokens - request.cached_on(w))) for w in prefill]
        candidates = []
        for worker in decode:
            pull = {"pull": self.pull_seconds(worker, request.num_tokens - request.cached_on(worker))}
            terms = pull | self._decode_terms(worker)
            candidates += [self._candidate(worker, first, until_token | terms) for first, until_token in firsts]
        return candidates

    def on_one_worker(self, worker: WorkerView) -> Candidate:
        """Predict prompt and decode on one worker, the prompt in chunks."""
        cost = self._costs[worker.worker_id]
        prompt = self._first_token(worker, self._request.num_tokens - self._request.cached_on(worker))
        work = self._delaying_work(worker)
        chunk = self._chunk(worker, worker.num_rows, worker.context_tokens)
        delay_seconds = work + math.ceil(work / chunk) * cost.prompt
        harm = self._harm(worker.num_rows, self._gap_beside(worker, work))
        terms = prompt | self._decode_terms(worker) | {"disturbance": harm * delay_seconds}
        return self._candidate(worker, None, terms)

    # -- overridden by objectives --------------------------------------------------------------------------------

    def _harm(self, num_rows: int, gap: float) -> float:
        """Weight of one second of delay for `num_rows` rows whose time between tokens becomes `gap`."""
        return min(num_rows, MOST_DISTURBED)

    def _chunk(self, worker: WorkerView, num_rows: int, context: float) -> float:
        """Prompt work in a step with so many decode rows, as the worker limits it."""
        return MAX_CHUNK_TOKENS * self._costs[worker.worker_id].prompt_token

    def _latencies(
        self, decode: WorkerView, prefill: WorkerView | None, terms: Mapping[str, float]
    ) -> tuple[float, float, float]:
        """Return TTFT, time between tokens, and by how much both miss their objectives; 0: not needed."""
        return 0.0, 0.0, 0.0

    # -- parts, also used by moves -------------------------------------------------------------------------------

    def decode_seconds(self, worker: WorkerView) -> float:
        """Predict the mean time between tokens on a worker with one more row, including delays by prompts."""
        step, share = self._decode_step(worker, 1), self.prompt_share(worker)
        chunk = self._chunk_seconds(worker)  # added to at most every step
        return step + (min(step * share / (1.0 - share), chunk) if share < 1.0 else chunk)

    def prompt_share(self, worker: WorkerView) -> float:
        """Share of a worker's time that the prompts arriving there take."""
        cost = self._costs[worker.worker_id]
        return min(cost.work(worker.prompt_tokens_per_second, worker.prompt_pairs_per_second), 1.0)

    def pull_seconds(self, worker: WorkerView, num_tokens: int) -> float:
        return num_tokens / (worker.pull_tokens_per_second or self._pull_rate)

    def crowding_seconds(self, worker: WorkerView) -> float:
        """Time per step that this request, as one more row, takes from all other rows."""
        cost = self._costs[worker.worker_id]
        return worker.num_rows * (cost.row + cost.context * self._request.num_tokens)

    def _delaying_work(self, worker: WorkerView) -> float:
        """Work of the request's prompt that would delay rows on the worker."""
        cached = self._request.cached_on(worker)
        num_tokens = max(self._request.num_tokens - cached - self._free_tokens, 0)
        return self._costs[worker.worker_id].work(num_tokens, num_pairs(cached, num_tokens))

    def _gap_beside(self, worker: WorkerView, work: float) -> float:
        """Predict the time between tokens of the worker's rows, with prompt chunks of `work` more in total."""
        chunk = self._chunk(worker, worker.num_rows, worker.context_tokens)
        beside = min(chunk, self._queued_work(worker) + work) if worker.num_rows else 0.0
        return self._decode_step(worker, 0) + (self._costs[worker.worker_id].prompt + beside if beside else 0.0)

    def _decode_step(self, worker: WorkerView, num_more: int) -> float:
        """Predict a step that only decodes, with `num_more` additional rows as long as the request."""
        context = worker.context_tokens + num_more * self._request.num_tokens
        return self._costs[worker.worker_id].seconds(worker.num_rows + num_more, context=context)

    def _chunk_seconds(self, worker: WorkerView) -> float:
        """Predict the time that a prompt chunk adds to a decode step with one more row."""
        context = worker.context_tokens + self._request.num_tokens
        chunk = self._chunk(worker, worker.num_rows + 1, context)
        work = max(self._queued_work(worker), self._usual_work(worker))
        return self._costs[worker.worker_id].prompt + min(chunk, work)

    def _queued_work(self, worker: WorkerView) -> float:
        return self._costs[worker.worker_id].work(worker.queued_prefill_tokens, worker.queued_prefill_pairs)

    def _usual_work(self, worker: WorkerView) -> float:
        """Mean work of the prompts that came to the worker recently."""
        if not worker.prompts_per_second:
            return math.inf
        cost = self._costs[worker.worker_id]
        work = cost.work(worker.prompt_tokens_per_second, worker.prompt_pairs_per_second)
        return work / worker.prompts_per_second

    def _prompt_seconds(self, worker: WorkerView, work: float) -> float:
        """Predict the time for this prompt work, in steps that also decode the worker's rows."""
        cost, num_rows = self._costs[worker.worker_id], worker.num_rows
        num_steps = math.ceil(work / self._chunk(worker, num_rows, worker.context_tokens))
        return work + num_steps * (self._decode_step(worker, 0) + cost.prompt)

    def _first_token(self, worker: WorkerView, num_new: int) -> dict[str, float]:
        queued = self._queued_work(worker)
        own = self._costs[worker.worker_id].work(num_new, num_pairs(self._request.num_tokens - num_new, num_new))
        queue = self._prompt_seconds(worker, queued)
        return {"queue": queue, "compute": self._prompt_seconds(worker, queued + own) - queue}

    def _decode_terms(self, worker: WorkerView) -> dict[str, float]:
        expected, cost = self._request.expected_tokens, self._costs[worker.worker_id]
        step = self.decode_seconds(worker)
        return {
            "slot": worker.slot_seconds(expected, cost.seconds(1)),
            "decode": expected * step * (1 + worker.kv_pressure),
            "crowding": expected * self.crowding_seconds(worker),
        }

    def _candidate(self, decode: WorkerView, prefill: WorkerView | None, terms: dict[str, float]) -> Candidate:
        ttft, itl, violation = self._latencies(decode, prefill, terms)
        computing = prefill or decode
        if lacking := self._request.lacking_adapter:
            involved = {decode.worker_id, computing.worker_id}
            terms = {**terms, "adapter": ADAPTER_SECONDS * len(involved & lacking)}
        return Candidate(
            decode=decode.worker_id,
            prefill=prefill.worker_id if prefill else None,
            cost=sum(terms.values()),
            terms=terms,
            cached_tokens=self._request.cached_on(computing),
            load=decode.load + (prefill.load if prefill else 0),
            is_measured=bool(computing.step.prompt_token and (decode.step.base or decode.step.prompt_token)),
            ttft_seconds=ttft,
            itl_seconds=itl,
            violation=violation,
        )


def _complete_costs(workers: Sequence[WorkerView]) -> dict[str, StepCost]:
    """Return step costs with missing measurements filled in: of a prefill worker that never decodes, or of a decode
    worker before its first prompt. A worker that was slow and then got nothing, while others did, is assumed to be as
    fast as the fastest; its next request tells whether it is."""
    decoding = [w.step for w in workers if w.step.base]
    computing = [w.step for w in workers if w.step.prompt_token]
    base = _mean([c.base for c in decoding], DEFAULT_STEP_SECONDS)
    row, context = _mean([c.row for c in decoding], 0.0), _mean([c.context for c in decoding], 0.0)
    prompt, pair = _mean([c.prompt for c in computing], 0.0), _mean([c.prompt_context for c in computing], 0.0)
    token = _mean([c.prompt_token for c in computing], 1 / DEFAULT_PREFILL_TOKENS_PER_SECOND)
    costs: dict[str, StepCost] = {}
    for worker in workers:
        step = worker.step
        costs[worker.worker_id] = StepCost(
            *((step.base, step.row, step.context) if step.base else (base, row, context)),
            *((step.prompt, step.prompt_token, step.prompt_context) if step.prompt_token else (prompt, token, pair)),
            step.spread,
        )
    forgotten = {worker.worker_id for worker in workers if worker.is_forgotten}
    if forgotten and len(forgotten) < len(workers):
        decode = min(costs.values(), key=lambda c: c.base + c.row)
        compute = min(costs.values(), key=lambda c: c.prompt_token)
        best = StepCost(
            decode.base, decode.row, decode.context, compute.prompt, compute.prompt_token, compute.prompt_context
        )
        costs |= dict.fromkeys(forgotten, best)
    return costs


def _mean(values: Sequence[float], default: float) -> float:
    return sum(values) / len(values) if values else default
