"""Truncates prompts to the length that a request asks for."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from common.errors import InvalidRequestError
from router.api.schemas import Body, GenerationBody
from router.workers.model_workers import ModelLimits

TruncationSide = Literal["left", "right"]  # where tokens are cut off


class TruncationFields(Body):
    """Fields of a request's body about truncation."""

    # Number of prompt tokens to keep; -1: as many as fit.
    truncate_prompt_tokens: Annotated[int, Field(ge=-1, lt=1 << 31)] | None = None
    truncation_side: TruncationSide | None = None

    @model_validator(mode="after")
    def _check_truncation(self) -> TruncationFields:
        if self.truncate_prompt_tokens == 0:
            raise InvalidRequestError("truncate_prompt_tokens must be -1 or positive", "truncate_prompt_tokens")
        return self


def truncated(token_ids: list[int], kept: int | None, most: int, side: TruncationSide | None) -> list[int]:
    """Return the last tokens of a prompt, or with side `right` the first, if the client asks for truncation.

    kept: the number that the client gives; None: no truncation. most: the meaning of -1.
    """
    if kept is None:
        return token_ids
    count = max(most, 1) if kept == -1 else kept
    return token_ids[:count] if side == "right" else token_ids[-count:]


def truncated_prompts(body: GenerationBody, limits: ModelLimits, prompts: list[list[int]]) -> list[list[int]]:
    """Return the truncated prompts of a request for text."""
    if not isinstance(body, TruncationFields) or body.truncate_prompt_tokens is None:
        return prompts
    most = most_prompt_tokens(body, limits)
    return [truncated(each, body.truncate_prompt_tokens, most, body.truncation_side) for each in prompts]


def most_prompt_tokens(body: GenerationBody, limits: ModelLimits) -> int:
    """Return how many prompt tokens leave room for the requested answer, or for a default one if it has no limit."""
    asked, _ = body.asked_tokens
    return limits.max_model_len - (body.default_tokens or 1 if asked is None else asked)
