"""Predicts latencies under objectives: prompts come in chunks that keep the time between tokens. Pure.

ITL = (decode step + prompt chunk, where prompts come) * measured spread of step times
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from common.objectives.chunks import chunk_work
from kvstore.types import WorkerId
from router.objectives.objectives import Objectives
from router.routing.predictor import MAX_CHUNK_TOKENS, Predictor
from router.routing.views import Candidate, RequestView, WorkerView

FEW_GAPS = 100  # up to so many gaps, the 99th percentile of an answer's gaps is the longest one
STEPS_IN_FLIGHT = 2  # steps that a request waits for when it comes to a worker
FEW = 0.01  # share of steps with prompts that does not show in a 99th percentile
HARM = 3.0  # weight of a delay when gaps are as long as the objective; a wait for a first token has weight 1


class ObjectivePredictor(Predictor):
    """A cost model where delays cost little while gaps are far below the objective, and placements may miss it."""

    def __init__(
        self,
        objectives: Objectives,
        request: RequestView,
        workers: Sequence[WorkerView],
        local_prefill_tokens: int = 0,
    ) -> None:
        super().__init__(request, workers, local_prefill_tokens)
        self._objectives = objectives
        self._itl_after_hand_over: dict[WorkerId, float] = {}

    def kept(self, worker: WorkerView) -> Candidate:
        """Predict prompt and decode on a prefill worker."""
        local = self.on_one_worker(worker)
        interruption = self._request.expected_tokens * self.interruption_seconds(worker)
        terms = {**local.terms, "interruption": interruption}
        return replace(local, is_kept=True, terms=terms, cost=sum(terms.values()))

    def interruption_seconds(self, worker: WorkerView, share: float = 0.0) -> float:
        """Predict the weighted delay of each token of a row on a prefill worker, by the prompts computed there.

        share: of the worker's time that prompts take, if larger than the recent share.
        """
        chunk = self._chunk_seconds(worker)
        gap = self._decode_step(worker, 1) + chunk
        return self._harm(1, gap) * max(self.prompt_share(worker), share) * chunk

    def share_beside_rows(self, worker: WorkerView) -> float:
        """Share of a prefill worker's time for steps with prompts, if it keeps the request as another row."""
        context = worker.context_tokens + self._request.num_tokens
        chunk = self._chunk(worker, worker.num_rows + 1, context)
        return self.prompt_share(worker) * (self._decode_step(worker, 1) + chunk) / chunk

    def gap_seconds(self, worker: WorkerView) -> float:
        """Predict the 99th percentile of the time between tokens with one more row."""
        cost = self._costs[worker.worker_id]
        chunk = self._chunk_seconds(worker)
        if self.prompt_share(worker) < FEW:
            queued = self._queued_work(worker)
            chunk = min(chunk, cost.prompt + queued) if queued else 0.0
        return cost.spread * (self._decode_step(worker, 1) + chunk)

    def hand_over_seconds(self, worker: WorkerView) -> float:
        """Predict the gap at a hand-over: pull of the last chunk, steps in flight there, the request's first step."""
        last = min(self._request.num_tokens - self._request.cached_on(worker), MAX_CHUNK_TOKENS)
        return self.pull_seconds(worker, last) + (STEPS_IN_FLIGHT + 1) * self.gap_seconds(worker)

    def queue_seconds(self, worker: WorkerView) -> float:
        """Predict the time until the prompts that wait on a worker are computed."""
        return self._prompt_seconds(worker, self._queued_work(worker))

    def _harm(self, num_rows: int, gap: float) -> float:
        if not self._objectives.itl:
            return super()._harm(num_rows, gap)
        return HARM * min(gap / self._objectives.itl, 1.0) ** 3 * num_rows

    def _chunk(self, worker: WorkerView, num_rows: int, context: float) -> float:
        largest = super()._chunk(worker, num_rows, context)
        if not self._objectives.itl or not num_rows:
            return largest
        cost = self._costs[worker.worker_id]
        return min(chunk_work(cost, self._objectives.itl, cost.seconds(num_rows, context=context)), largest)

    def _latencies(
        self, decode: WorkerView, prefill: WorkerView | None, terms: Mapping[str, float]
    ) -> tuple[float, float, float]:
        ttft = terms["queue"] + terms["compute"]
        if prefill is not None:
            itl = self._itl_after_hand_over.get(decode.worker_id)
            if itl is None:
                itl = self.gap_seconds(decode)
                if self._request.expected_tokens <= FEW_GAPS:  # otherwise the gap is too rare to matter
                    itl = max(itl, self.hand_over_seconds(decode) + terms["slot"])
                self._itl_after_hand_over[decode.worker_id] = itl
        else:
            ttft += terms["slot"]
            own_gap = self._gap_beside(decode, self._delaying_work(decode))
            itl = max(self._costs[decode.worker_id].spread * own_gap, self.gap_seconds(decode))
        return ttft, itl, self._objectives.violation(ttft, itl)
