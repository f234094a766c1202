"""Schemas of `/v1/embeddings` (OpenAI's), and of `/v1/score` and `/v1/rerank` (as in vLLM)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field, model_validator

from common.errors import InvalidRequestError
from router.api.message_schemas import (
    MAX_LABEL_CHARS,
    MAX_MESSAGES,
    Body,
    Label,
    Message,
    TemplateKwargs,
    check_messages,
)
from router.api.schemas import TokenIdField

MAX_INPUTS = 2048  # of a request, as OpenAI's API has it

TokenIds = Annotated[list[TokenIdField], Field(min_length=1)]
Texts = Annotated[
    str | Annotated[list[str], Field(min_length=1, max_length=MAX_INPUTS)] | None,
    Field(description=f"a text or a list of at most {MAX_INPUTS} texts"),
]


class VectorBody(Body):
    """Fields that all requests for vectors have in common."""

    model: Label | None = None
    pooling: Literal["last", "mean", "cls"] | None = None
    user: Label | None = None
    priority: Annotated[int, Field(ge=-(1 << 31), lt=1 << 31)] | None = None
    cache_salt: Annotated[str, Field(min_length=1, max_length=MAX_LABEL_CHARS)] | None = None
    truncate_prompt_tokens: Annotated[int, Field(ge=-1, lt=1 << 31)] | None = None  # -1: to what the model takes
    add_special_tokens: bool = True

    @model_validator(mode="after")
    def _check_truncation(self) -> VectorBody:
        if self.truncate_prompt_tokens == 0:
            raise InvalidRequestError("truncate_prompt_tokens must be -1 or positive", "truncate_prompt_tokens")
        return self


class EmbeddingBody(VectorBody):
    """POST /v1/embeddings, of inputs or, as in vLLM, of one conversation in the model's chat template."""

    input: Annotated[
        str
        | Annotated[list[str], Field(min_length=1, max_length=MAX_INPUTS)]
        | TokenIds
        | Annotated[list[TokenIds], Field(min_length=1, max_length=MAX_INPUTS)]
        | None,
        Field(description=f"a text, a list of token ids, or a list of at most {MAX_INPUTS} of either; none empty"),
    ] = None
    messages: Annotated[list[Message], Field(min_length=1, max_length=MAX_MESSAGES)] | None = None
    add_generation_prompt: bool = False
    continue_final_message: bool = False
    chat_template_kwargs: TemplateKwargs = None
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: Annotated[int, Field(ge=1, lt=1 << 31)] | None = None
    normalize: bool | None = None

    @model_validator(mode="after")
    def _check_input(self) -> EmbeddingBody:
        if (self.input is None) == (self.messages is None):
            raise InvalidRequestError("give either input or messages", "input")
        if self.messages is None:
            for name in ("add_generation_prompt", "continue_final_message", "chat_template_kwargs"):
                if getattr(self, name):
                    raise InvalidRequestError(f"{name} is for messages", name)
            return self
        check_messages(self.messages)
        if self.continue_final_message and self.add_generation_prompt:
            message = "continue_final_message and add_generation_prompt exclude each other"
            raise InvalidRequestError(message, "continue_final_message")
        if self.add_special_tokens and "add_special_tokens" in self.model_fields_set:
            message = "add_special_tokens: the chat template says which special tokens messages have"
            raise InvalidRequestError(message, "add_special_tokens")
        return self

    @property
    def inputs(self) -> Sequence[str | Sequence[int]]:
        """Each of them a text or token ids; none of a conversation."""
        if self.input is None:
            return []
        if isinstance(self.input, str) or isinstance(self.input[0], int):
            return [self.input]
        return self.input


class ScoreBody(VectorBody):
    """POST /v1/score"""

    text_1: Texts = None
    text_2: Texts = None
    queries: Texts = None  # another name of text_1, as documents is of text_2
    documents: Texts = None

    @model_validator(mode="after")
    def _check_pairs(self) -> ScoreBody:
        for names in (("text_1", "queries"), ("text_2", "documents")):
            if sum(getattr(self, name) is not None for name in names) != 1:
                raise InvalidRequestError(f"give either {names[0]} or {names[1]}", names[0])
        num_left, num_right = len(self.left), len(self.right)
        if num_left not in (1, num_right):
            message = f"text_1 has {num_left} texts and text_2 {num_right}: give one and several, or as many of each"
            raise InvalidRequestError(message, "text_1")
        return self

    @property
    def left(self) -> list[str]:
        return _listed(self.queries if self.text_1 is None else self.text_1)

    @property
    def right(self) -> list[str]:
        return _listed(self.documents if self.text_2 is None else self.text_2)


class Document(Body):
    """A text in an object, whose other fields are the client's own."""

    model_config = ConfigDict(extra="ignore")

    text: str


class RerankBody(VectorBody):
    """POST /v1/rerank"""

    query: str
    documents: Annotated[
        list[str | Document],
        Field(min_length=1, max_length=MAX_INPUTS - 1, description="a list of texts, or of objects with a text"),
    ]
    top_n: Annotated[int, Field(ge=0, lt=1 << 31)] | None = None  # 0: all
    return_documents: bool | None = None
    max_tokens_per_doc: Annotated[int, Field(ge=1, lt=1 << 31)] | None = None

    @property
    def texts(self) -> list[str]:
        return [each if isinstance(each, str) else each.text for each in self.documents]


def _listed(texts: Any) -> list[str]:
    return [texts] if isinstance(texts, str) else list(texts)
