"""Drafters for tests, which know the answer or do not."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field

from engine.speculation.drafter import Drafter

Continue = Callable[[list[int], int], list[int]]  # the next tokens of a sequence, as they will be sampled


@dataclass
class Oracle:
    """Right with a probability of `accuracy` per token, and sometimes has no idea."""

    following: Continue
    accuracy: float
    vocab_size: int
    random: random.Random

    def propose(self, token_ids: list[int], max_tokens: int) -> list[int]:
        assert max_tokens > 0
        count = self.random.choice([0, 1, max_tokens, max_tokens, max_tokens + 1])
        tokens = self.following(token_ids, count)
        return [t if self.random.random() < self.accuracy else self.random.randrange(self.vocab_size) for t in tokens]


@dataclass
class MakeOracle:
    """One for each request, and all that were made."""

    following: Continue
    accuracy: float
    vocab_size: int
    seed: int = 0
    made: list[Oracle] = field(default_factory=list)

    def __call__(self) -> Drafter:
        rng = random.Random(f"{self.seed} {len(self.made)}")
        oracle = Oracle(self.following, self.accuracy, self.vocab_size, rng)
        self.made.append(oracle)
        return oracle


def knows(answers: list[list[int]]) -> Continue:
    """From whole sequences, prompt and output, of which no two prompts begin alike."""

    def following(token_ids: list[int], count: int) -> list[int]:
        for answer in answers:
            if answer[: len(token_ids)] == token_ids:
                return answer[len(token_ids) : len(token_ids) + count]
        raise AssertionError("a request has other tokens than without speculation")

    return following
