"""Records of a proposer's drafts, for tests."""

from __future__ import annotations

from collections.abc import Callable

from engine.assembly import EngineParts
from engine.plan import StepResult
from engine.request import SamplingParams
from engine.runner import Sampled
from engine.speculation.heads.proposer import FromHead
from tests.engine.driving import answers
from tests.engine.tiny_models import VOCAB_SIZE

GREEDY = SamplingParams(max_tokens=40, temperature=0.0, ignore_eos=True)


class Recording:
    """Records each proposal: the known tokens, and the drafts after them."""

    def __init__(self, proposer: FromHead) -> None:
        self.proposed: list[tuple[list[int], list[int]]] = []
        propose = proposer.propose

        def recorded(found: StepResult, sampled: list[Sampled]) -> None:
            propose(found, sampled)
            requests = {row: request for _, row, request, _, _ in sampled}
            self.proposed += [(list(requests[row].token_ids), each.token_ids) for row, each in found.drafts.items()]

        proposer.propose = recorded  # type: ignore[assignment, method-assign]


def check_drafts(parts: EngineParts, num_drafts: int, reference: Callable[[list[int], int], list[int]]) -> None:
    """Check the drafts of every step, alone and among others, with any acceptance, prompts in chunks or whole.

    reference: returns the drafts after known tokens.
    """
    recording = Recording(parts.runner._proposer)
    prompts = [[(13 * i + 7 * j) % VOCAB_SIZE for j in range(5 + 9 * i)] for i in range(4)]
    answers(parts.engine, prompts, GREEDY)
    assert len(recording.proposed) > 100
    for known, drafts in recording.proposed[::13]:
        assert drafts == reference(known, len(drafts))
    assert max(len(drafts) for _, drafts in recording.proposed) == num_drafts
    assert max(len(known) for known, _ in recording.proposed) > 64
