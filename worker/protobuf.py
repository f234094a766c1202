"""The front's conversions: protobuf messages of routers to and from the fields that its engine understands."""

from __future__ import annotations

from typing import Any

from protos import types_pb2 as pb

FINISH_REASONS = {
    None: pb.FINISH_REASON_NONE,
    "stop": pb.FINISH_REASON_STOP,
    "length": pb.FINISH_REASON_LENGTH,
    "cancelled": pb.FINISH_REASON_CANCELLED,
    "prefilled": pb.FINISH_REASON_PREFILLED,
}
FAILURE_CODES: dict[str, Any] = {name.removeprefix("FAILURE_CODE_"): code for name, code in pb.FailureCode.items()}


def submit_fields(submit: pb.Submit, prefill_only: bool) -> dict[str, Any]:
    """What the engine needs of a Submit."""
    s = submit.sampling
    return {
        "prompt": list(submit.prompt_token_ids),
        "output": list(submit.output_token_ids),
        "sampling": {
            "max_tokens": s.max_tokens,
            "min_tokens": s.min_tokens,
            "temperature": s.temperature,
            "top_p": s.top_p or 1.0,
            "top_k": max(s.top_k, 0),
            "min_p": s.min_p,
            "presence_penalty": s.presence_penalty,
            "frequency_penalty": s.frequency_penalty,
            "repetition_penalty": s.repetition_penalty or 1.0,
            "seed": s.seed,
            "stop_token_ids": list(s.stop_token_ids),
            "ignore_eos": s.ignore_eos,
            "logit_bias": [[b.token_id, b.bias] for b in s.logit_bias],
            "allowed_token_ids": list(s.allowed_token_ids),
            "bad_words": [list(word.token_ids) for word in s.bad_words],
            "logprobs": s.logprobs if s.HasField("logprobs") else None,
            "prompt_logprobs": s.prompt_logprobs if s.HasField("prompt_logprobs") else None,
        },
        "priority": submit.priority,
        "adapter": submit.adapter,
        "cache_salt": submit.cache_salt,
        "prefill_only": prefill_only,
        "deadline_seconds": submit.deadline_seconds,
        "handle": handle_fields(submit.kv_handle) if submit.HasField("kv_handle") else None,
    }


def handle_fields(handle: pb.KvHandle) -> dict[str, Any]:
    """A KvHandle as frames carry it: by the names of its fields, shards unread."""
    return {
        "lease_id": handle.lease_id,
        "worker_id": handle.worker_id,
        "epoch": handle.epoch,
        "num_tokens": handle.num_tokens,
        "lease_seconds": handle.lease_seconds,
        "shards": list(handle.shards),
    }


def token_delta(fields: list[Any], request_id: str) -> pb.TokenDelta:
    """An engine's delta as protobuf."""
    _, token_ids, finish, stop_token_id, logprobs, prompt_logprobs, handle, times = fields
    delta = pb.TokenDelta(request_id=request_id, token_ids=token_ids, finish_reason=FINISH_REASONS[finish])
    if stop_token_id is not None:
        delta.stop_token_id = stop_token_id
    if logprobs:
        delta.logprobs.extend(map(_logprobs, logprobs))
    if prompt_logprobs:
        delta.prompt_logprobs.extend(map(_logprobs, prompt_logprobs))
    if handle is not None:
        delta.kv_handle.CopyFrom(pb.KvHandle(**handle))
    if times is not None:
        delta.times.CopyFrom(pb.RequestTimes(**times))
    return delta


def _logprobs(fields: list[Any]) -> pb.TokenLogprobs:
    token_id, logprob, rank, top_token_ids, top_logprobs = fields
    return pb.TokenLogprobs(
        token_id=token_id, logprob=logprob, rank=rank, top_token_ids=top_token_ids, top_logprobs=top_logprobs
    )


def failure(request_id: str, status: str, message: str, param: str = "", error_code: str = "") -> pb.Failure:
    """`status` is a name of the exception table; one that Failure does not have is internal."""
    code = FAILURE_CODES.get(status, pb.FAILURE_CODE_INTERNAL)
    return pb.Failure(request_id=request_id, code=code, message=message, param=param, error_code=error_code)
