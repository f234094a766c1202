"""Fields of the messages between front and engine, as msgpack carries them. The engine needs no protobuf."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from engine.request import SamplingParams, TokenLogprobs


def request_kwargs(fields: dict[str, Any]) -> dict[str, Any]:
    """Arguments of `Engine.add_request` from a SUBMIT. Raises InvalidRequestError for bad sampling parameters."""
    sampling = fields["sampling"]
    for name in ("stop_token_ids", "allowed_token_ids"):
        sampling[name] = tuple(sampling[name])
    for name in ("logit_bias", "bad_words"):
        sampling[name] = tuple(tuple(entry) for entry in sampling[name])
    handle = fields["handle"]
    return {
        "prompt_token_ids": fields["prompt"],
        "output_token_ids": fields["output"],
        "params": SamplingParams(**sampling),
        "priority": fields["priority"],
        "cache_salt": fields["cache_salt"],
        "prefill_only": fields["prefill_only"],
        "kv_source": handle,
        "num_source_tokens": handle["num_tokens"] if handle else 0,
    }


def covers_request(fields: dict[str, Any], block_size: int) -> bool:
    """Whether the handle is for exactly these tokens: all but the last, block by block."""
    handle = fields["handle"]
    num_tokens: int = handle["num_tokens"]
    is_complete = num_tokens == len(fields["prompt"]) + len(fields["output"]) - 1
    return is_complete and len(handle["block_ids"]) == -(-num_tokens // block_size)


def wire_logprobs(entries: Sequence[TokenLogprobs]) -> list[list[Any]]:
    """Positional, in the order of TokenLogprobs' fields."""
    return [[e.token_id, e.logprob, e.rank, e.top_token_ids, e.top_logprobs] for e in entries]
