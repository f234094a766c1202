"""Fields of the messages between front and rank, as msgpack carries them. The rank needs no protobuf."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from common.errors import InvalidRequestError
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


def check_handle(fields: dict[str, Any], block_size: int) -> None:
    """A handle must cover all tokens but the last, block by block. Raises InvalidRequestError."""
    handle = fields["handle"]
    num_tokens = handle["num_tokens"]
    if num_tokens != len(fields["prompt"]) + len(fields["output"]) - 1:
        raise InvalidRequestError("the KV handle covers another number of tokens than the request has", "kv_handle")
    if len(handle["block_ids"]) != -(-num_tokens // block_size):
        raise InvalidRequestError("the KV handle names another number of blocks than its tokens need", "kv_handle")


def wire_logprobs(entries: Sequence[TokenLogprobs]) -> list[list[Any]]:
    """Positional, in the order of TokenLogprobs' fields."""
    return [[e.token_id, e.logprob, e.rank, e.top_token_ids, e.top_logprobs] for e in entries]
