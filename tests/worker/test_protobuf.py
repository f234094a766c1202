"""Messages of routers, converted to and from the engine process' types.

A new sampling field is written in three places: SamplingParams in protos/types.proto, SamplingParams in
engine/request.py, and the router's schema with what it makes of it (router/api). Another field of a request is
written in four: the schema (router/api/schemas.py), `Gateway._request`, Submit in protos/types.proto, and Request in
engine/request.py. A test says which is missing.
"""

from __future__ import annotations

import random
from contextlib import suppress
from dataclasses import fields
from math import inf, nan
from typing import Any

import msgspec
import pytest
from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message

from common.errors import InvalidRequestError, MiniInferError, OverloadedError, TransferError
from common.model_files import resolve_model
from common.text.load import load_tokenizer
from common.token_ids import pack_ids
from engine.request import FinishReason, RequestId, SamplingParams, TokenLogprobs
from protos import types_pb2 as pb
from router.workers.model_workers import ModelLimits
from worker.messages import Delta
from worker.protobuf import failure_of, request_of, sampling_params, token_delta

# For every field a value that is not its default. Floats are exact in 32 bits.
SAMPLING: dict[str, Any] = {
    "max_tokens": 100,
    "min_tokens": 3,
    "temperature": 0.5,
    "top_p": 0.25,
    "top_k": 7,
    "min_p": 0.125,
    "presence_penalty": -1.5,
    "frequency_penalty": 1.5,
    "repetition_penalty": 1.25,
    "seed": 2**64 - 1,
    "stop_token_ids": (4, 5),
    "ignore_eos": True,
    "num_speculative_tokens": 5,
    "seed_is_drawn": True,
    "logit_bias": ((6, -2.5), (7, 100.0)),
    "allowed_token_ids": (8, 9),
    "bad_words": ((10, 11), (12,)),
    "grammar": "regex:[a-z]+",
    "logprobs": 0,
    "prompt_logprobs": 20,
    "pooling": "mean",
}
NOT_CLIENTS = {"grammar", "prompt_logprobs", "pooling", "seed_is_drawn"}  # conversions of other fields
MESSAGE = pb.SamplingParams(
    **{
        **SAMPLING,
        "logit_bias": [pb.TokenBias(token_id=token_id, bias=bias) for token_id, bias in SAMPLING["logit_bias"]],
        "bad_words": [pb.TokenSequence(token_ids=word) for word in SAMPLING["bad_words"]],
    }
)


def names_of(message: Any) -> set[str]:
    return {field.name for field in message.DESCRIPTOR.fields}


def test_a_sampling_field_is_in_the_protobuf_message_and_in_the_dataclass() -> None:
    carried, known = names_of(pb.SamplingParams), {field.name for field in fields(SamplingParams)}
    assert not known - carried, f"add {known - carried} to SamplingParams in protos/types.proto"
    assert not carried - known, f"add {carried - known} to SamplingParams in engine/request.py"
    assert not known - SAMPLING.keys(), f"give {known - SAMPLING.keys()} a value in SAMPLING of this test"


def test_every_sampling_field_reaches_the_engine() -> None:
    params = SamplingParams(**SAMPLING)
    unchanged = [name for name, value in SAMPLING.items() if value == getattr(SamplingParams(), name)]
    assert not unchanged, f"{unchanged} would pass if they were lost: choose other values than the defaults"
    arrived = request_of(pb.Submit(sampling=MESSAGE), 0.0).params
    lost = {name for name in SAMPLING if getattr(arrived, name) != getattr(params, name)}
    assert not lost, f"lost between router and engine: {lost}; see sampling_params in worker/protobuf.py"


def test_every_field_of_a_request_reaches_the_engine() -> None:
    """A field that a Submit has and `Request` has, too, travels by its name."""
    values: dict[str, Any] = {"output_token_ids": [3, 4], "priority": 5, "cache_salt": "s", "adapter": "a"}
    apart = {"request_id", "prompt_token_ids", "sampling", "kv_handle", "keep", "deadline_seconds", "due_seconds"}
    lost = names_of(pb.Submit) - apart - values.keys()
    assert not lost, f"give {lost} a value here, and a place in Request, engine/request.py"
    prompt = pack_ids([1, 2])
    submit = pb.Submit(request_id="r", prompt_token_ids=prompt, sampling=MESSAGE, due_seconds=0.5, **values)
    arrived = request_of(submit, 100.0)
    assert {name: getattr(arrived, name) for name in values} == values
    assert (arrived.request_id, arrived.prompt_token_ids, arrived.due) == ("r", [1, 2], 100.5)
    assert arrived.prefill_only
    submit = pb.Submit(prompt_token_ids=prompt, sampling=MESSAGE, keep=True)
    plain = request_of(submit, 100.0)
    assert (plain.prefill_only, plain.due) == (False, inf)


@pytest.mark.wing("router.logit_rules")
@pytest.mark.wing("router.completions_api")
def test_clients_can_set_every_sampling_field() -> None:
    from router.answers.features import AnswerFeatures
    from router.completions_api.bodies import COMPLETION_BODY

    fields = {name: value for name, value in SAMPLING.items() if name not in NOT_CLIENTS} | {
        "prompt": "x", "logprobs": 5, "echo": True, "stop_token_ids": [4, 5], "seed": 9, "logit_bias": {"6": -2.5},
        "allowed_token_ids": [8, 9], "bad_words": ["bad"],
    }  # fmt: skip
    tokenizer, limits = load_tokenizer(resolve_model("dry-run")), ModelLimits(max_model_len=200, vocab_size=200)
    message = AnswerFeatures("regex:a").sampling(COMPLETION_BODY.model_validate(fields), tokenizer, limits, [1])
    apart = {"pooling", "seed_is_drawn"}  # no completion's, and not where there is a seed
    missing = names_of(message) - {field.name for field, _ in message.ListFields()} - apart
    assert not missing, f"router/api/sampling.py does not set {missing} from the schema in router/api/schemas.py"
    assert sampling_params(message).top_p == 0.25


def test_zero_is_off() -> None:
    assert sampling_params(pb.SamplingParams(max_tokens=1)) == SamplingParams(max_tokens=1, temperature=0.0, seed=0)


def test_what_the_dataclass_refuses_is_refused() -> None:
    with pytest.raises(InvalidRequestError, match="top_k"):
        sampling_params(pb.SamplingParams(max_tokens=1, top_k=-2))


def test_a_delta_with_everything() -> None:
    logprobs = [TokenLogprobs(5, -0.5, 1, (5, 6), (-0.5, -1.5))]
    times = pb.RequestTimes(queue_seconds=0.5, transport="shm")
    reason, given = FinishReason.STOP, times.SerializeToString()
    delta = Delta(RequestId("r"), [5], reason, 5, logprobs, logprobs * 2, None, given)
    entry = pb.TokenLogprobs(token_id=5, logprob=-0.5, rank=1, top_token_ids=[5, 6], top_logprobs=[-0.5, -1.5])
    assert token_delta(msgspec.msgpack.decode(msgspec.msgpack.encode(delta), type=Delta)) == pb.TokenDelta(
        request_id="r", token_ids=[5], finish_reason=pb.FINISH_REASON_STOP, stop_token_id=5, logprobs=[entry],
        prompt_logprobs=[entry, entry], times=times,
    )  # fmt: skip


@pytest.mark.parametrize("reason", [*FinishReason, None])
def test_every_finish_reason_has_a_code(reason: FinishReason | None) -> None:
    name = f"FINISH_REASON_{reason.name if reason else 'NONE'}"
    assert token_delta(Delta(RequestId("a"), [], reason)).finish_reason == pb.FinishReason.Value(name)


def test_failures_say_what_the_client_got_wrong() -> None:
    assert failure_of(InvalidRequestError("why", "field", "code"), "r") == pb.Failure(
        request_id="r", code=pb.FAILURE_CODE_INVALID_ARGUMENT, message="why", param="field", error_code="code"
    )
    assert failure_of(OverloadedError("why"), "r").code == pb.FAILURE_CODE_RESOURCE_EXHAUSTED
    assert failure_of(TransferError("why"), "r").code == pb.FAILURE_CODE_INTERNAL  # a status that routers do not know


NUMBERS = [0, 1, 5, 2**31 - 1]
EXTREMES: dict[int, list[Any]] = {
    FieldDescriptor.CPPTYPE_INT32: [*NUMBERS, -1, -(2**31)],
    FieldDescriptor.CPPTYPE_INT64: [*NUMBERS, -1, 2**63 - 1, -(2**63)],
    FieldDescriptor.CPPTYPE_UINT32: [*NUMBERS, 2**32 - 1],
    FieldDescriptor.CPPTYPE_UINT64: [*NUMBERS, 2**64 - 1],
    FieldDescriptor.CPPTYPE_FLOAT: [0.0, 1.0, -1.0, 1e30, nan, inf],
    FieldDescriptor.CPPTYPE_DOUBLE: [0.0, 1.0, -1.0, 1e300, nan, inf],
    FieldDescriptor.CPPTYPE_BOOL: [False, True],
    FieldDescriptor.CPPTYPE_ENUM: [0, 1],
}


def fill(message: Message, draw: random.Random) -> None:
    """Set half of the fields, to extreme values."""
    for field in message.DESCRIPTOR.fields:
        if draw.random() < 0.5 or (field.message_type and field.message_type.GetOptions().map_entry):
            continue
        if field.message_type:
            parts = getattr(message, field.name)
            for part in [parts.add() for _ in range(draw.randrange(3))] if field.is_repeated else [parts]:
                part.SetInParent()
                fill(part, draw)
            continue
        texts: list[Any] = [b"", b"12345", b"1234"] if field.type == field.TYPE_BYTES else ["", "x", "{", "\0"]
        values = [draw.choice(EXTREMES.get(field.cpp_type, texts)) for _ in range(3)]
        if field.is_repeated:
            getattr(message, field.name).extend(values)
        else:
            setattr(message, field.name, values[0])


def test_whatever_a_router_sends_is_a_request_or_refused() -> None:
    """Any other error would end the engine process, and all its requests."""
    draw, num_requests = random.Random(1), 0
    for _ in range(2000):
        submit = pb.Submit()
        fill(submit, draw)
        with suppress(MiniInferError):
            request_of(submit, 0.0)
            num_requests += 1
    assert 0 < num_requests < 2000
