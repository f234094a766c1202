"""Predictions under latency objectives: prompts come in chunks that keep the time between tokens. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from common.objectives.chunks import chunk_work
from router.objectives.objectives import Objectives
from router.routing.predictor import Predictor
from router.routing.views import Candidate, RequestView, WorkerView

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

    def _violation(self, ttft: float, itl: float) -> float:
        return self._objectives.violation(ttft, itl)
