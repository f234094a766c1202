"""Proposes drafts from the tokens of requests alone."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from engine.plan import StepResult
from engine.request import RequestId
from engine.request_states import RequestState
from engine.runner import Proposer, Sampled
from engine.speculation.acceptance import Acceptance, DraftRecord
from engine.speculation.drafter import Drafter

MakeDrafter = Callable[[RequestState], Drafter]


class FromTokens(Proposer):
    """Proposes drafts from a request's tokens alone, with one drafter per request."""

    def __init__(self, make_drafter: MakeDrafter, num_tokens: int, num_kinds: int) -> None:
        """num_tokens: most drafts of one row. num_kinds: number of the drafters' kinds."""
        self._make_drafter, self._num_tokens = make_drafter, num_tokens
        self._acceptance = Acceptance(num_kinds)
        self._drafters: dict[RequestId, Drafter] = {}

    def propose(self, found: StepResult, sampled: Sequence[Sampled]) -> None:
        """See Proposer."""
        for _, row, request, _, _ in sampled:
            if row in found.drafts or not found.token_ids[row] or request.prefill_only:
                continue
            most = most_drafts(request, self._num_tokens)
            if not most:
                continue
            if request.drafter is None:
                self.forget([request.request_id])
                drafter = self._drafters[request.request_id] = self._make_drafter(request)
                request.drafter = drafter, DraftRecord()
            drafter, record = request.drafter
            self._acceptance.learn(record, found.token_ids[row])
            proposal = drafter.propose(request.token_ids, most)
            found.drafts[row] = self._acceptance.propose(record, *proposal)

    def forget(self, request_ids: Iterable[RequestId]) -> None:
        """See Proposer."""
        for request_id in request_ids:
            drafter = self._drafters.pop(request_id, None)
            if drafter is not None:
                drafter.end()


def most_drafts(request: RequestState, num_tokens: int) -> int:
    """Return the most drafts of a row of the request, `num_tokens` unless the request asks for fewer."""
    asked = request.params.num_speculative_tokens
    return num_tokens if asked is None else min(asked, num_tokens)
