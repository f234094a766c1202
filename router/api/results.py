"""The answer to a request, collected: its choices and its token counts. Plain data."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from protos import types_pb2 as pb
from router.api.text import DeltaToolCall, Update


@dataclass(slots=True)
class Usage:
    """Token counts of a request so far."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0
    reasoning_tokens: int = 0

    def as_dict(self) -> dict[str, Any]:
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": self.prompt_tokens + self.completion_tokens,
            "prompt_tokens_details": {"cached_tokens": self.cached_tokens},
            **(
                {"completion_tokens_details": {"reasoning_tokens": self.reasoning_tokens}}
                if self.reasoning_tokens
                else {}
            ),
        }


@dataclass(slots=True)
class ChoiceResult:
    """All updates of one choice, merged."""

    index: int
    prompt_index: int = 0
    pieces: list[str] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[pb.TokenLogprobs] = field(default_factory=list)
    prompt_logprobs: list[pb.TokenLogprobs] = field(default_factory=list)
    tool_calls: list[DeltaToolCall] = field(default_factory=list)
    reasoning_pieces: list[str] = field(default_factory=list)
    finish_reason: str | None = None
    stop_reason: str | int | None = None

    def add(self, update: Update) -> None:
        self.pieces.append(update.text)
        self.token_ids += update.token_ids
        self.logprobs += update.logprobs
        self.prompt_logprobs += update.prompt_logprobs
        self.tool_calls += update.tool_calls
        self.reasoning_pieces.append(update.reasoning)
        self.finish_reason, self.stop_reason = update.finish_reason, update.stop_reason

    @property
    def text(self) -> str:
        return "".join(self.pieces)

    @property
    def reasoning(self) -> str:
        return "".join(self.reasoning_pieces)

    @property
    def mean_logprob(self) -> float:
        """Score that best_of compares; a choice without tokens is the worst."""
        return sum(item.logprob for item in self.logprobs) / len(self.logprobs) if self.logprobs else -math.inf


def merged_calls(deltas: Sequence[DeltaToolCall]) -> list[DeltaToolCall]:
    """One delta for each call, as clients expect of a chunk or a message."""
    by_index: dict[int, list[DeltaToolCall]] = {}
    for delta in deltas:
        by_index.setdefault(delta.index, []).append(delta)
    return [
        replace(parts[0], arguments="".join(part.arguments for part in parts)) if len(parts) > 1 else parts[0]
        for parts in by_index.values()
    ]


def best_results(results: Sequence[ChoiceResult], n: int) -> list[ChoiceResult]:
    """The n choices of each prompt with the best mean logprob, numbered anew."""
    by_prompt: dict[int, list[ChoiceResult]] = {}
    for result in results:
        by_prompt.setdefault(result.prompt_index, []).append(result)
    kept: list[ChoiceResult] = []
    for group in by_prompt.values():
        if len(group) > n:
            group.sort(key=lambda result: result.mean_logprob, reverse=True)
        for result in group[:n]:
            result.index = len(kept)
            kept.append(result)
    return kept
