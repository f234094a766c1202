"""Drafters for tests, which know the answer with a given accuracy."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest

import engine.speculation.proposer
from engine.config import EngineConfig
from engine.speculation.draft_length import DraftLengths
from engine.speculation.drafter import Drafter, Proposal
from engine.speculation.drafts import Speculation
from engine.speculation.from_tokens import FromTokens
from engine.speculation.settings import SpeculationSettings

Continue = Callable[[list[int], int], list[int]]  # the next tokens of a sequence, as they will be sampled


@dataclass
class Oracle(Drafter):
    """Drafts each token right with probability `accuracy`, and sometimes drafts nothing."""

    following: Continue
    accuracy: float
    vocab_size: int
    random: random.Random

    def propose(self, token_ids: list[int], max_tokens: int) -> Proposal:
        assert max_tokens > 0
        count = self.random.choice([0, 1, max_tokens, max_tokens, max_tokens])
        tokens = self.following(token_ids, count)
        return of_one_kind(
            [t if self.random.random() < self.accuracy else self.random.randrange(self.vocab_size) for t in tokens]
        )


@dataclass
class MakeOracle:
    """Makes an oracle for each request, and keeps them."""

    following: Continue
    accuracy: float
    vocab_size: int
    seed: int = 0
    made: list[Oracle] = field(default_factory=list)

    def __call__(self, _request: object = None) -> Drafter:
        rng = random.Random(f"{self.seed} {len(self.made)}")
        oracle = Oracle(self.following, self.accuracy, self.vocab_size, rng)
        self.made.append(oracle)
        return oracle


def of_one_kind(token_ids: list[int]) -> Proposal:
    return Proposal(token_ids, [0] * len(token_ids))


def draft_with(
    monkeypatch: pytest.MonkeyPatch,
    make_drafter: Callable[[], Drafter],
    on_gpu: bool = False,
    is_adaptive: bool = False,
) -> None:
    """Use these drafters instead of the shipped one. on_gpu: keep a GPU's limits, wherever the engine runs."""

    def speculation(config: EngineConfig, runner: Any, *_: Any) -> Speculation | None:
        num_tokens = config.of(SpeculationSettings).num_speculative_tokens
        if not num_tokens:
            return None
        runner.propose_with(FromTokens(lambda _request: make_drafter(), num_tokens, 1))
        return Speculation(DraftLengths(is_adaptive), config.max_num_seqs if on_gpu else None)

    monkeypatch.setattr(engine.speculation.proposer, "open_speculation", speculation)


def knows(answers: list[list[int]]) -> Continue:
    """Make oracles from whole sequences, prompt and output; no two prompts may begin alike."""

    def following(token_ids: list[int], count: int) -> list[int]:
        for answer in answers:
            if answer[: len(token_ids)] == token_ids:
                return answer[len(token_ids) : len(token_ids) + count]
            if token_ids[: len(answer)] == answer:  # it has ended, which its runner is not told
                return []
        raise AssertionError("a request has other tokens than without speculation")

    return following
