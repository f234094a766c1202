"""Predictions of latencies, and under objectives: prompts come in chunks that keep the time between tokens. Pure.

ITL = decode step, with a chunk of a prompt beside it where prompts come, times the measured spread of steps
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from common.objectives.chunks import chunk_work
from kvstore.types import WorkerId
from router.objectives.objectives import Objectives
from router.routing.predictor import MAX_CHUNK_TOKENS, Predictor
from router.routing.views import Candidate, RequestView, WorkerView

FEW_GAPS = 100  # up to which the 99th percentile of an answer's gaps is the longest one
STEPS_IN_FLIGHT = 2  # that a request which comes to a worker waits for
FEW = 0.01  # share of steps beside prompts that a 99th percentile does not see
HARM = 3.0  # weight of a delay that makes gaps as long as the objective; a wait for a first token has 1


class ObjectivePredictor(Predictor):
    """A delay harms little while gaps are far below the objective; placements may miss it."""

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
        """Prompt and decode on a prefill worker."""
        local = self.on_one_worker(worker)
        interruption = self._request.expected_tokens * self.interruption_seconds(worker)
        terms = {**local.terms, "interruption": interruption}
        return replace(local, is_kept=True, terms=terms, cost=sum(terms.values()))

    def interruption_seconds(self, worker: WorkerView, share: float = 0.0) -> float:
        """What prompts that a prefill worker computes at once do to each token of a row there, weighed.

        share: of its time that they take, if it is more than lately.
        """
        chunk = self._chunk_seconds(worker)
        gap = self._decode_step(worker, 1) + chunk
        return self._harm(1, gap) * max(self.prompt_share(worker), share) * chunk

    def share_beside_rows(self, worker: WorkerView) -> float:
        """Share of its time that steps with prompts take when a row is kept there."""
        context = worker.context_tokens + self._request.num_tokens
        chunk = self._chunk(worker, worker.num_rows + 1, context)
        return self.prompt_share(worker) * (self._decode_step(worker, 1) + chunk) / chunk

    def gap_seconds(self, worker: WorkerView) -> float:
        """The time between tokens that one in a hundred exceeds, with one row more."""
        cost = self._costs[worker.worker_id]
        chunk = self._chunk_seconds(worker)
        if self.prompt_share(worker) < FEW:
            queued = self._queued_work(worker)
            chunk = min(chunk, cost.prompt + queued) if queued else 0.0
        return cost.spread * (self._decode_step(worker, 1) + chunk)

    def hand_over_seconds(self, worker: WorkerView) -> float:
        """The gap while a request comes to a worker: the last chunk's pull, the steps in flight there, its own."""
        last = min(self._request.num_tokens - self._request.cached_on(worker), MAX_CHUNK_TOKENS)
        return self.pull_seconds(worker, last) + (STEPS_IN_FLIGHT + 1) * self.gap_seconds(worker)

    def queue_seconds(self, worker: WorkerView) -> float:
        """Time until the prompts that wait on a worker are computed."""
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
                if self._request.expected_tokens <= FEW_GAPS:  # its first token has come by then
                    itl = max(itl, self.hand_over_seconds(decode) + terms["slot"])
                self._itl_after_hand_over[decode.worker_id] = itl
        else:
            ttft += terms["slot"]
            own_gap = self._gap_beside(decode, self._delaying_work(decode))
            itl = max(self._costs[decode.worker_id].spread * own_gap, self.gap_seconds(decode))
        return ttft, itl, self._objectives.violation(ttft, itl)
