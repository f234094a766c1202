"""A runner without a model: the next token is a function of all tokens before it, read back through the blocks.

It keeps, per block and slot, which token was "computed" there. So a test that sees the right tokens has shown that
scheduler and pool kept every block's content where it belongs, through eviction, swap and preemption.
"""

from __future__ import annotations

from engine.request import StepPlan, StepResult

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


class BlockMemoryRunner:
    """Stores token ids as "KV" in blocks and host slots, and reads the context back from there."""

    def __init__(self, block_size: int) -> None:
        self.block_size = block_size
        self.blocks: dict[int, list[int | None]] = {}
        self.host: dict[int, list[int | None]] = {}
        self.num_computed_tokens = 0
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
            new = request.token_ids(row.start, row.start + row.num_new_tokens)
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
            assert context == request.token_ids(0, row.start + row.num_new_tokens), "KV of other tokens"
            result.token_ids.append([next_token(context)] if row.samples else [])  # type: ignore[arg-type]
            result.logprobs.append([])
            result.prompt_logprobs.append([])
        return result
