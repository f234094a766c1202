"""A step of a stage that passes hidden states on; the last stage samples its tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from engine.plan import PendingStep, ScheduledRow, StepResult
from engine.request import TokenId
from engine.request_states import RequestState


@dataclass(slots=True)
class UnsampledStep:
    """A step whose tokens another stage samples."""

    rows: Sequence[ScheduledRow]
    requests: Sequence[RequestState]
    pending: PendingStep  # samples nothing

    def result(self) -> StepResult:
        """See PendingStep."""
        return self.pending.result()

    def take(self, token_ids: Sequence[Sequence[TokenId]]) -> None:
        """Take each row's sampled tokens, once all stages have run the step."""
        self.pending.result()
        for row, request, sampled in zip(self.rows, self.requests, token_ids, strict=True):
            for position, token_id in enumerate(sampled, row.stop - len(row.draft_token_ids)):
                request.put_token(position, token_id)
