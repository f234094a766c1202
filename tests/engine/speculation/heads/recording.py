"""What a proposer proposes, kept for tests."""

from __future__ import annotations

from engine.plan import StepResult
from engine.runner import Sampled
from engine.speculation.heads.proposer import FromHead


class Recording:
    """Keeps what a proposer proposes: the tokens known, and the drafts behind them."""

    def __init__(self, proposer: FromHead) -> None:
        self.proposed: list[tuple[list[int], list[int]]] = []
        propose = proposer.propose

        def recorded(found: StepResult, sampled: list[Sampled]) -> None:
            propose(found, sampled)
            requests = {row: request for _, row, request, _, _ in sampled}
            self.proposed += [(list(requests[row].token_ids), each.token_ids) for row, each in found.drafts.items()]

        proposer.propose = recorded  # type: ignore[assignment, method-assign]
