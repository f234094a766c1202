"""The front's conversions: protobuf messages of routers to and from the messages of its engine process.

Requests and sampling parameters are converted by the names of their fields: one that the protobuf message and the
other type both have needs nothing here.
"""

from __future__ import annotations

from dataclasses import asdict
from functools import cache
from typing import Any

from google.protobuf.descriptor import Descriptor
from google.protobuf.message import Message as Protobuf
from msgspec import to_builtins
from msgspec.structs import asdict as struct_fields

from common.process import Resident
from engine.request import FinishReason, RequestId, SamplingParams
from kvstore.handle.handle import KvHandle
from protos import types_pb2 as pb
from worker.messages import Delta, EngineLoad, Failure, KvOffer, Submit

FINISH_REASONS = {
    None: pb.FINISH_REASON_NONE,
    FinishReason.STOP: pb.FINISH_REASON_STOP,
    FinishReason.LENGTH: pb.FINISH_REASON_LENGTH,
    FinishReason.CANCELLED: pb.FINISH_REASON_CANCELLED,
    FinishReason.PREFILLED: pb.FINISH_REASON_PREFILLED,
}
FAILURE_CODES: dict[str, Any] = {name.removeprefix("FAILURE_CODE_"): code for name, code in pb.FailureCode.items()}
SCALARS = (int, float, str, bytes)  # bool is an int
# What both messages have under one name travels by it: a new field of a request needs nothing here.
SUBMIT_FIELDS = ({field.name for field in pb.Submit.DESCRIPTOR.fields} & set(Submit.__struct_fields__)) - {
    "request_id"
}
OFF_WHEN_ZERO = ("top_p", "repetition_penalty")  # zero cannot be meant: the default, which is off, applies


def submit_of(submit: pb.Submit, request_id: RequestId) -> Submit:
    """The engine process's form of a Submit. Raises InvalidRequestError for bad sampling parameters."""
    return Submit(
        request_id,
        sampling_params(submit.sampling),
        handle_of(submit.kv_handle) if submit.HasField("kv_handle") else None,
        prefill_only=not submit.keep,
        **{name: _plain(getattr(submit, name)) for name in SUBMIT_FIELDS},
    )


def sampling_params(message: pb.SamplingParams) -> SamplingParams:
    """Convert by the names of the fields. Raises InvalidRequestError."""
    fields = _fields(message)
    for name in OFF_WHEN_ZERO:
        if not fields[name]:
            del fields[name]
    return SamplingParams(**fields)


def handle_of(message: pb.KvHandle) -> KvHandle:
    """Convert a handle without reading its shards."""
    return KvHandle(**_fields(message))


@cache
def _names(kind: Descriptor) -> list[tuple[str, bool]]:
    """Names of a message's fields, and whether each can be unset."""
    return [(field.name, field.has_presence) for field in kind.fields]


def _fields(message: Protobuf) -> dict[str, Any]:
    """Plain values by the names of their fields; an optional one that is unset is None."""
    return {
        name: None if optional and not message.HasField(name) else _plain(getattr(message, name))
        for name, optional in _names(message.DESCRIPTOR)
    }


def _plain(value: Any) -> Any:
    """Numbers and texts as they are, the rest as tuples; a message with a single field as that field."""
    if isinstance(value, SCALARS):
        return value
    if not isinstance(value, Protobuf):
        return tuple(map(_plain, value))
    fields = tuple(_fields(value).values())
    return fields[0] if len(fields) == 1 else fields


def token_delta(delta: Delta, request_id: str) -> pb.TokenDelta:
    """`request_id`: the router's."""
    message = pb.TokenDelta(
        request_id=request_id, token_ids=delta.token_ids, finish_reason=FINISH_REASONS[delta.finish_reason]
    )
    if delta.stop_token_id is not None:
        message.stop_token_id = delta.stop_token_id
    if delta.logprobs:
        message.logprobs.extend(pb.TokenLogprobs(**to_builtins(entry)) for entry in delta.logprobs)
    if delta.prompt_logprobs:
        message.prompt_logprobs.extend(pb.TokenLogprobs(**to_builtins(entry)) for entry in delta.prompt_logprobs)
    if delta.handle is not None:
        message.kv_handle.CopyFrom(pb.KvHandle(**asdict(delta.handle)))
    if delta.times is not None:
        message.times.CopyFrom(pb.RequestTimes(**struct_fields(delta.times)))
    if delta.num_draft_tokens:
        message.num_draft_tokens, message.num_accepted_tokens = delta.num_draft_tokens, delta.num_accepted_tokens
    return message


def kv_offer(offer: KvOffer, request_id: str) -> pb.KvOffer:
    """`request_id`: the router's."""
    handle = pb.KvHandle(**asdict(offer.handle))
    return pb.KvOffer(kv_handle=handle, block_keys=offer.block_keys, request_id=request_id)


def failure_of(failure: Failure, request_id: str) -> pb.Failure:
    """`request_id`: the router's. A status that protobuf's Failure does not have is internal."""
    code = FAILURE_CODES.get(failure.status, pb.FAILURE_CODE_INTERNAL)
    return pb.Failure(
        request_id=request_id, code=code, message=failure.message, param=failure.param, error_code=failure.error_code
    )


def load_report(load: EngineLoad, front: Resident, engine: Resident) -> pb.LoadReport:
    """front, engine: memory of the worker's two processes."""
    return pb.LoadReport(
        **struct_fields(load),
        front_private_bytes=front.private_bytes,
        engine_private_bytes=engine.private_bytes,
        engine_shared_bytes=engine.shared_bytes,
    )
