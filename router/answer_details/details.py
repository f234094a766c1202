"""Log-probabilities, token ids and prompts in answers: the request fields for them, and their JSON for chats."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any

from pydantic import Field, model_validator

from common.errors import InvalidRequestError
from common.text.tokenizer import Tokenizer
from protos import types_pb2 as pb
from router.api.render import Details
from router.api.schemas import MAX_LOGPROBS, Body, GenerationBody
from router.api.text import ChoiceResult, Update

MIN_LOGPROB = -9999.0  # JSON has no -inf


class DetailFields(Body):
    """Request fields of all APIs."""

    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None  # in log-probabilities, instead of tokens' texts


class ChatDetailFields(DetailFields):
    """Request fields of chats."""

    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    return_prompt_text: bool | None = None

    @model_validator(mode="after")
    def _check_details(self) -> ChatDetailFields:
        if self.top_logprobs and not self.logprobs:
            raise InvalidRequestError("top_logprobs needs logprobs: true", "top_logprobs")
        return self

    @property
    def num_logprobs(self) -> int | None:
        return self.top_logprobs or 0 if self.logprobs else None


def details_of(body: GenerationBody, tokenizer: Tokenizer, prompt_token_ids: list[int]) -> Details | None:
    """Return the details for the answers to a chat request; None if it asks only for text."""
    if isinstance(body, ChatDetailFields) and (body.logprobs or body.return_token_ids or body.return_prompt_text):
        return ChatDetails(body, tokenizer, prompt_token_ids)
    return None


class ChatDetails(Details):
    """Details of the answers to one chat request."""

    def __init__(self, body: ChatDetailFields, tokenizer: Tokenizer, prompt_token_ids: list[int]) -> None:
        self._body = body
        self._tokenizer = tokenizer
        self._prompt_token_ids = prompt_token_ids
        self.are_of_tokens = bool(body.logprobs or body.return_token_ids)

    def prompt(self) -> dict[str, Any]:
        fields: dict[str, Any] = {"prompt_token_ids": self._prompt_token_ids} if self._body.return_token_ids else {}
        if self._body.return_prompt_text:
            fields["prompt_text"] = self._tokenizer.decode(self._prompt_token_ids, skip_special=False)
        return fields

    def chunk(self, update: Update | ChoiceResult) -> dict[str, Any]:
        fields: dict[str, Any] = {}
        if self._body.logprobs and update.logprobs:
            fields["logprobs"] = self._logprobs(update.logprobs)
        if self._body.return_token_ids:
            fields["token_ids"] = update.token_ids
        return fields

    def choice(self, result: ChoiceResult) -> dict[str, Any]:
        logprobs = {"logprobs": self._logprobs(result.logprobs)} if self._body.logprobs else {}
        return self.chunk(result) | logprobs

    def _logprobs(self, items: Sequence[pb.TokenLogprobs]) -> dict[str, Any]:
        content = []
        for item in items:
            entry = self._token(item.token_id, item.logprob)
            entry["top_logprobs"] = [
                self._token(token_id, logprob)
                for token_id, logprob in zip(item.top_token_ids, item.top_logprobs, strict=True)
            ]
            content.append(entry)
        return {"content": content, "refusal": None}

    def _token(self, token_id: int, logprob: float) -> dict[str, Any]:
        data = self._tokenizer.token_bytes(token_id)
        name = token_name(self._body, self._tokenizer, token_id)
        return {"token": name, "logprob": finite(logprob), "bytes": list(data)}


def token_name(body: DetailFields, tokenizer: Tokenizer, token_id: int) -> str:
    """Return the name of a token in log-probabilities."""
    if body.return_tokens_as_token_ids:
        return f"token_id:{token_id}"
    return tokenizer.token_bytes(token_id).decode("utf-8", "replace")


def finite(logprob: float) -> float:
    return logprob if logprob > MIN_LOGPROB else MIN_LOGPROB
