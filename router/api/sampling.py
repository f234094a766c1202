"""Translates API parameters to the SamplingParams of workers. Raises InvalidRequestError."""

from __future__ import annotations

import secrets
from collections.abc import Sequence

from common.errors import ContextLengthError, InvalidRequestError
from protos import types_pb2 as pb
from router.api.schemas import GenerationBody
from router.workers.model_workers import ModelLimits

SEED_MASK = (1 << 64) - 1


def sampling_params(body: GenerationBody, limits: ModelLimits, num_prompt_tokens: int) -> pb.SamplingParams:
    """Return the parameters of a prompt's first choice."""
    max_tokens = _max_tokens(body, limits, num_prompt_tokens)
    params = pb.SamplingParams(
        max_tokens=max_tokens,
        min_tokens=body.min_tokens or 0,
        temperature=1.0 if body.temperature is None else body.temperature,
        top_p=1.0 if body.top_p is None else body.top_p,
        top_k=max(body.top_k or 0, 0),
        min_p=body.min_p or 0.0,
        seed=(secrets.randbits(63) if body.seed is None else body.seed) & SEED_MASK,
        seed_is_drawn=body.seed is None,
        stop_token_ids=checked_ids(body.stop_token_ids or [], limits.vocab_size, "stop_token_ids"),
        ignore_eos=bool(body.ignore_eos),
        num_speculative_tokens=body.num_speculative_tokens,
        logprobs=body.num_logprobs,
        prompt_logprobs=body.num_prompt_logprobs,
    )
    if params.min_tokens > max_tokens:
        raise InvalidRequestError(f"min_tokens {params.min_tokens} exceeds max_tokens {max_tokens}", "min_tokens")
    return params


def _max_tokens(body: GenerationBody, limits: ModelLimits, num_prompt_tokens: int) -> int:
    asked, field = body.asked_tokens
    param = body.prompt_field
    room = limits.max_model_len - num_prompt_tokens
    if room < 1:
        raise ContextLengthError(
            limits.max_model_len,
            f"your {param} resulted in {num_prompt_tokens} tokens, which leaves no room for an answer. "
            f"Please reduce the length of the {param}",
            param,
        )
    if asked is None:
        return min(room, max(body.default_tokens or room, body.min_tokens or 0))
    if asked > room and not body.may_exceed_context:
        raise ContextLengthError(
            limits.max_model_len,
            f"you requested {num_prompt_tokens + asked} tokens ({num_prompt_tokens} in the {param}, {asked} in the "
            f"completion). Please reduce the length of the {param} or completion: {field} must be at most {room}, "
            f"not {asked}",
            field,
        )
    # For 0, which only echoes the prompt, workers still generate one token, which is not shown.
    return max(min(asked, room), 1)


def checked_ids(token_ids: Sequence[int], vocab_size: int, param: str) -> list[int]:
    """Return `token_ids`. Raises InvalidRequestError for one outside the vocabulary."""
    largest = max(token_ids, default=0)
    if largest >= vocab_size:
        raise InvalidRequestError(f"{param}: token id {largest} is outside the vocabulary of {vocab_size}", param)
    return list(token_ids)
