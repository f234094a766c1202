"""A runner without a model: the next token is a function of all tokens before it, read back through the blocks.

It keeps, per block and slot, which token was "computed" there. So a test that sees the right tokens has shown that
scheduler and pool kept every block's content where it belongs, through eviction, swap and preemption. With windows it
keeps that for each KV group, and reads what each group's layers would.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

from engine.plan import StepPlan, StepResult
from engine.request import TokenId
from engine.request_states import RequestState, RequestStates
from engine.runner import NO_DRAFT, Proposer, Sampled

VOCAB_SIZE = 1000


def next_token(token_ids: list[int]) -> int:
    """Return the oracle's next token: deterministic, it depends on every token and on their order."""
    state = 7
    for token_id in token_ids:
        state = (state * 31 + token_id + 1) % 1_000_003
    return state % VOCAB_SIZE


def expected_tokens(prompt: list[int], num_tokens: int) -> list[int]:
    tokens = list(prompt)
    for _ in range(num_tokens):
        tokens.append(next_token(tokens))
    return tokens[len(prompt) :]


@dataclass(slots=True)
class FakeStep:
    """A step whose tokens enter the runner's state only when they are read, as on a GPU."""

    runner: BlockMemoryRunner
    found: StepResult
    sampled: list[tuple[Sampled, int]] = field(default_factory=list)
    compute: Callable[[], None] | None = None  # what the device has not done yet

    def run(self) -> None:
        """Do what the device does in this step."""
        compute, self.compute = self.compute, None
        if compute is not None:
            compute()

    def result(self) -> StepResult:
        self.run()
        assert self.runner.in_flight.pop(0) is self, "results are taken in the order of the launches"
        for (_, _, request, position, _), token_id in self.sampled:
            request.put_token(position, token_id)
        self.runner.proposer.propose(self.found, [entry for entry, _ in self.sampled])
        return self.found


def accepted_tokens(draft_token_ids: Sequence[TokenId], sampled: Sequence[TokenId]) -> Sequence[TokenId]:
    """Return the accepted ones of the tokens sampled after the last known token and after each draft.

    A token is accepted while every draft before it equals the token sampled at the draft's position.
    """
    count = 0
    while count < len(draft_token_ids) and draft_token_ids[count] == sampled[count]:
        count += 1
    return sampled[: count + 1]


class BlockMemoryRunner:
    """Stores token ids as "KV" in blocks and host slots, and reads the context back from there.

    Like a GPU it keeps the last token of each request itself, because the host does not know it yet.
    """

    def __init__(
        self, block_size: int, max_steps_in_flight: int = 1, windows: tuple[int, ...] = (0,), is_late: bool = False
    ) -> None:
        """windows: of each KV group, 0: none. is_late: steps touch memory only when their results are asked for."""
        self.block_size = block_size
        self.windows = windows
        self.max_steps_in_flight = max_steps_in_flight
        self.is_late = is_late
        self.most_in_flight = 0
        self.in_flight: list[FakeStep] = []
        self.blocks: dict[int, list[int | None]] = {}
        self.host: dict[int, list[int | None]] = {}
        self.num_computed_tokens = 0
        self.plans: list[StepPlan] = []
        self.last_token: dict[str, int] = {}
        self.proposer = Proposer()
        self.is_pipeline = False  # its rows follow tokens that are known
        self.fail_on: set[int] = set()  # token ids that make a row's computation raise
        self._requests = RequestStates()

    def needs_known_tokens(self, plan: StepPlan) -> bool:
        return self._requests.needs_tokens(plan.rows)

    def check(self) -> None:
        pass

    def launch(self, plan: StepPlan) -> FakeStep:
        self.plans.append(plan)
        requests = self._requests.apply(plan)
        step = FakeStep(self, StepResult.of_rows(len(requests)))
        step.compute = partial(self._compute, plan, requests, step)
        if not self.is_late:
            step.run()
        self.in_flight.append(step)
        self.most_in_flight = max(self.most_in_flight, len(self.in_flight))
        return step

    def catch_up(self) -> None:
        """Apply the memory accesses of all steps in flight."""
        for step in self.in_flight:
            step.run()

    def _compute(self, plan: StepPlan, requests: Sequence[RequestState], step: FakeStep) -> None:
        for block_id, slot in plan.copies_out:
            self.host[slot] = list(self.blocks[block_id])
        for slot, block_id in plan.copies_in:
            self.blocks[block_id] = list(self.host[slot])
        for index, (row, request) in enumerate(zip(plan.rows, requests, strict=True)):
            self.num_computed_tokens += row.num_tokens
            drafts = list(row.draft_token_ids)
            num_known = row.stop - len(drafts)
            new = self._tokens(request, row.start, num_known) + drafts
            if self.fail_on & set(new):
                raise RuntimeError("told to fail")
            tokens = self._tokens(request, 0, num_known) + drafts
            for group, window in enumerate(self.windows):
                table = request.block_ids[group :: len(self.windows)]
                for position, token_id in enumerate(new, row.start):
                    cells = self.blocks.setdefault(table[position // self.block_size], [None] * self.block_size)
                    cells[position % self.block_size] = token_id + group * VOCAB_SIZE
                first = max(row.start - window + 1, 0) if window else 0
                context = [
                    self.blocks[table[p // self.block_size]][p % self.block_size] for p in range(first, row.stop)
                ]
                assert context == [token_id + group * VOCAB_SIZE for token_id in tokens[first:]], "KV of other tokens"
            if row.samples:
                sampled = [next_token(tokens[:stop]) for stop in range(num_known, row.stop + 1)]
                accepted = accepted_tokens(drafts, sampled)
                self.last_token[request.request_id] = accepted[-1]
                step.found.token_ids[index] += accepted
                for position, token_id in enumerate(accepted, num_known):
                    step.sampled.append(((len(step.sampled), index, request, position, NO_DRAFT), token_id))

    def _tokens(self, request: RequestState, start: int, stop: int) -> list[int]:
        """Return the known tokens, followed by the one that only the device has seen."""
        known = request.token_ids[start:stop]
        assert len(known) == stop - start or not self.is_pipeline
        return known if len(known) == stop - start else [*known, self.last_token[request.request_id]]
