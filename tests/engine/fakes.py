"""A runner without a model: the next token is a function of all tokens before it, read back through the blocks.

It keeps, per block and slot, which token was "computed" there. So a test that sees the right tokens has shown that
scheduler and pool kept every block's content where it belongs, through eviction, swap and preemption.
"""

from __future__ import annotations

import copy
from collections.abc import Callable

from engine.request import Request, ScheduledRow, StepPlan, StepResult

VOCAB_SIZE = 1000


def next_token(token_ids: list[int]) -> int:
    """The oracle: deterministic, depends on every token and on the order."""
    state = 7
    for token_id in token_ids:
        state = (state * 31 + token_id + 1) % 1_000_003
    return state % VOCAB_SIZE


def expected_tokens(prompt: list[int], num_tokens: int) -> list[int]:
    tokens = list(prompt)
    for _ in range(num_tokens):
        tokens.append(next_token(tokens))
    return tokens[len(prompt) :]


class OverlappedFake:
    """A BlockMemoryRunner behind a queue: a step is computed when its result, or the next launch, asks for it.

    Like a GPU it keeps the last token of each request itself, because the host does not know it yet.
    """

    def __init__(self, inner: BlockMemoryRunner) -> None:
        self.inner = inner
        self.max_in_flight = 0
        self._open = 0

    def run(self, plan: StepPlan) -> StepResult:
        return self.inner.run(plan)

    def needs_known_tokens(self, plan: StepPlan) -> bool:
        """Requests with a penalty stand for all that need the host."""
        return any(row.request.params.presence_penalty for row in plan.rows)

    def launch(self, plan: StepPlan) -> Callable[[], StepResult]:
        self._open += 1
        self.max_in_flight = max(self.max_in_flight, self._open)
        # Requests change while the step is in flight; what a launch reads is what it was launched with.
        rows = [ScheduledRow(copy.copy(row.request), row.start, row.num_new_tokens, row.samples) for row in plan.rows]
        for row in rows:
            row.request.block_ids = list(row.request.block_ids)
            row.request.output_token_ids = list(row.request.output_token_ids)
        try:
            result = self.inner.run(StepPlan(rows, plan.copies_out, plan.copies_in))
        except Exception:
            self._open -= 1
            raise

        def take() -> StepResult:
            self._open -= 1
            return result

        return take


class BlockMemoryRunner:
    """Stores token ids as "KV" in blocks and host slots, and reads the context back from there."""

    def __init__(self, block_size: int) -> None:
        self.block_size = block_size
        self.blocks: dict[int, list[int | None]] = {}
        self.host: dict[int, list[int | None]] = {}
        self.num_computed_tokens = 0
        self.last_token: dict[str, int] = {}
        self.fail_on: set[int] = set()  # token ids that make a row's computation raise

    def run(self, plan: StepPlan) -> StepResult:
        for block_id, slot in plan.copies_out:
            self.host[slot] = list(self.blocks[block_id])
        for slot, block_id in plan.copies_in:
            self.blocks[block_id] = list(self.host[slot])
        result = StepResult([], [], [])
        for row in plan.rows:
            request = row.request
            self.num_computed_tokens += row.num_new_tokens
            new = self._tokens(request, row.start, row.start + row.num_new_tokens)
            if self.fail_on & set(new):
                raise RuntimeError("told to fail")
            for position, token_id in enumerate(new, row.start):
                block_id = request.block_ids[position // self.block_size]
                cells = self.blocks.setdefault(block_id, [None] * self.block_size)
                cells[position % self.block_size] = token_id
            context = [
                self.blocks[request.block_ids[p // self.block_size]][p % self.block_size]
                for p in range(row.start + row.num_new_tokens)
            ]
            assert context == self._tokens(request, 0, row.start + row.num_new_tokens), "KV of other tokens"
            sampled = [next_token(context)] if row.samples else []  # type: ignore[arg-type]
            if sampled:
                self.last_token[request.request_id] = sampled[0]
            result.token_ids.append(sampled)
            result.logprobs.append([])
            result.prompt_logprobs.append([])
        return result

    def _tokens(self, request: Request, start: int, stop: int) -> list[int]:
        """Known tokens, and behind them the one that only this runner has seen."""
        known = request.token_ids(start, min(stop, request.num_known_tokens))
        return known if stop <= request.num_known_tokens else [*known, self.last_token[request.request_id]]
