"""The fields of a request that change its logits, and their conversion to workers' parameters."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from common.errors import InvalidRequestError
from common.text.tokenizer import Tokenizer
from protos import types_pb2 as pb
from router.api.sampling import checked_ids
from router.api.schemas import MAX_LIST, Body, StopString, TokenIdField
from router.workers.model_workers import ModelLimits

MAX_BIASES = 1024
MAX_ALLOWED_IDS = 65_536
Bias = Annotated[float, Field(ge=-100, le=100)]


class LogitRuleFields(Body):
    """Fields of a request's body that change logits."""

    presence_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    repetition_penalty: Annotated[float, Field(gt=0, le=10)] | None = None
    logit_bias: Annotated[dict[str, Bias], Field(max_length=MAX_BIASES)] | None = None
    allowed_token_ids: Annotated[list[TokenIdField], Field(min_length=1, max_length=MAX_ALLOWED_IDS)] | None = None
    bad_words: Annotated[list[StopString], Field(max_length=MAX_LIST)] | None = None


def add_rules(params: pb.SamplingParams, body: LogitRuleFields, tokenizer: Tokenizer, limits: ModelLimits) -> None:
    """Set the workers' parameters for a request's rules. Raises InvalidRequestError."""
    params.presence_penalty = body.presence_penalty or 0.0
    params.frequency_penalty = body.frequency_penalty or 0.0
    params.repetition_penalty = 1.0 if body.repetition_penalty is None else body.repetition_penalty
    if body.logit_bias:
        params.logit_bias.extend(_biases(body.logit_bias, limits))
    if body.allowed_token_ids:
        params.allowed_token_ids.extend(checked_ids(body.allowed_token_ids, limits.vocab_size, "allowed_token_ids"))
    if body.bad_words:
        sequences = _bad_words(body.bad_words, tokenizer)
        params.bad_words.extend(pb.TokenSequence(token_ids=token_ids) for token_ids in sequences)


def _biases(given: dict[str, float], limits: ModelLimits) -> list[pb.TokenBias]:
    biases = []
    for key, bias in given.items():
        if not (key.isascii() and key.isdigit() and len(key) <= 10) or int(key) >= limits.vocab_size:
            raise InvalidRequestError(
                f"logit_bias: {key[:20]!r} is not a token id below {limits.vocab_size}", "logit_bias"
            )
        biases.append(pb.TokenBias(token_id=int(key), bias=bias))
    return biases


def _bad_words(words: list[str], tokenizer: Tokenizer) -> list[list[int]]:
    """Return token ids of each word, both at the start of a text and after a space."""
    sequences: list[list[int]] = []
    for word in words:
        bare = word.lstrip(" ") or word
        for spelled in (bare, " " + bare):
            token_ids = tokenizer.encode(spelled)
            if token_ids and token_ids not in sequences:
                sequences.append(token_ids)
    return sequences
