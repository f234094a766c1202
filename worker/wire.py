"""Fields of the messages between front and engine, as msgpack carries them. The engine needs no protobuf."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from engine.request import SamplingParams, TokenLogprobs
from kvstore.transport.handle import PeerLease


def request_kwargs(fields: dict[str, Any], lease: PeerLease | None) -> dict[str, Any]:
    """Arguments of `Engine.add_request` from a SUBMIT, whose KV is under `lease`.

    Raises InvalidRequestError for bad sampling parameters.
    """
    sampling = fields["sampling"]
    for name in ("stop_token_ids", "allowed_token_ids"):
        sampling[name] = tuple(sampling[name])
    for name in ("logit_bias", "bad_words"):
        sampling[name] = tuple(tuple(entry) for entry in sampling[name])
    return {
        "prompt_token_ids": fields["prompt"],
        "output_token_ids": fields["output"],
        "params": SamplingParams(**sampling),
        "priority": fields["priority"],
        "adapter": fields["adapter"],
        "cache_salt": fields["cache_salt"],
        "prefill_only": fields["prefill_only"],
        "kv_source": lease,
        "num_source_tokens": lease.num_tokens if lease else 0,
    }


def covers_request(lease: PeerLease, fields: dict[str, Any], block_size: int) -> bool:
    """Whether the lease is on exactly these tokens: all but the last, block by block."""
    is_complete = lease.num_tokens == len(fields["prompt"]) + len(fields["output"]) - 1
    return is_complete and lease.num_blocks == -(-lease.num_tokens // block_size)


def wire_logprobs(entries: Sequence[TokenLogprobs]) -> list[list[Any]]:
    """Positional, in the order of TokenLogprobs' fields."""
    return [[e.token_id, e.logprob, e.rank, e.top_token_ids, e.top_logprobs] for e in entries]
