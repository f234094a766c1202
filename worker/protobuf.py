"""Converts routers' protobuf messages to the engine's types, and the engine's results to protobuf.

Requests and sampling parameters are converted by field names: a field that exists in both types needs no code here.
"""

from __future__ import annotations

from dataclasses import fields
from math import inf
from typing import Any

from google.protobuf.message import Message as Protobuf
from msgspec import to_builtins

from common.errors import InvalidRequestError, MiniInferError, mapping_for, public_message
from common.token_ids import unpack_ids
from engine.request import FinishReason, Request, RequestId, SamplingParams
from protos import types_pb2 as pb
from worker.messages import Delta

FINISH_REASONS: dict[FinishReason | None, Any] = {
    None: pb.FINISH_REASON_NONE,
    **{reason: pb.FinishReason.Value(f"FINISH_REASON_{reason.name}") for reason in FinishReason},
}
FAILURE_CODES: dict[str, Any] = {name.removeprefix("FAILURE_CODE_"): code for name, code in pb.FailureCode.items()}
SCALARS = (int, float, str, bytes)  # bool is an int


def _plain(value: Any) -> Any:
    """Return numbers and text unchanged, other values as tuples, and a message with one field as that field."""
    if isinstance(value, SCALARS):
        return value
    if not isinstance(value, Protobuf):
        return tuple(map(_plain, value))
    fields = tuple(_plain(getattr(value, field.name)) for field in value.DESCRIPTOR.fields)
    return fields[0] if len(fields) == 1 else fields


# Fields that Submit and Request share, with equal names and types.
REQUEST_FIELDS = {field.name for field in pb.Submit.DESCRIPTOR.fields} & {field.name for field in fields(Request)} - {
    "request_id", "prompt_token_ids", "output_token_ids",
}  # fmt: skip
# Values of sampling fields that are not set. These two are never 0 on purpose: unset, their defaults (off) apply.
UNSET: dict[str, Any] = {
    field.name: None if field.has_presence else _plain(field.default_value)
    for field in pb.SamplingParams.DESCRIPTOR.fields
    if field.name not in ("top_p", "repetition_penalty")
}


def request_of(submit: pb.Submit, now: float) -> Request:
    """Convert a router's request. Raises InvalidRequestError for bad sampling parameters."""
    return Request(
        RequestId(submit.request_id),
        unpack_ids(submit.prompt_token_ids),
        sampling_params(submit.sampling),
        list(submit.output_token_ids),
        prefill_only=not submit.keep,
        due=now + submit.due_seconds if submit.due_seconds else inf,
        **{name: getattr(submit, name) for name in REQUEST_FIELDS},
    )


def sampling_params(message: pb.SamplingParams) -> SamplingParams:
    """Convert by field names. Raises InvalidRequestError."""
    return SamplingParams(**UNSET | {field.name: _plain(value) for field, value in message.ListFields()})


def token_delta(delta: Delta) -> pb.TokenDelta:
    message = pb.TokenDelta(
        request_id=delta.request_id, token_ids=delta.token_ids, finish_reason=FINISH_REASONS[delta.finish_reason]
    )
    if delta.stop_token_id is not None:
        message.stop_token_id = delta.stop_token_id
    if delta.logprobs:
        message.logprobs.extend(pb.TokenLogprobs(**to_builtins(entry)) for entry in delta.logprobs)
    if delta.prompt_logprobs:
        message.prompt_logprobs.extend(pb.TokenLogprobs(**to_builtins(entry)) for entry in delta.prompt_logprobs)
    if delta.handle is not None:
        message.kv_handle.CopyFrom(pb.KvHandle.FromString(delta.handle))
    if delta.times is not None:
        message.times.CopyFrom(pb.RequestTimes.FromString(delta.times))
    if delta.num_draft_tokens:
        message.num_draft_tokens, message.num_accepted_tokens = delta.num_draft_tokens, delta.num_accepted_tokens
    return message


def failure_of(error: MiniInferError, request_id: str) -> pb.Failure:
    """Convert an exception. A status that FailureCode does not have becomes INTERNAL."""
    code = FAILURE_CODES.get(mapping_for(error).grpc_status, pb.FAILURE_CODE_INTERNAL)
    failure = pb.Failure(request_id=request_id, code=code, message=public_message(error))
    if isinstance(error, InvalidRequestError):
        failure.param, failure.error_code = error.param or "", error.code or ""
    return failure
