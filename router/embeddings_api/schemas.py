"""Schemas of `/v1/embeddings` (OpenAI's), and of `/v1/score` and `/v1/rerank` (as in vLLM)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field, model_validator

from common.errors import InvalidRequestError
from router.api.schemas import (
    MAX_LABEL_CHARS,
    MAX_MESSAGES,
    Body,
    Label,
    TokenIdField,
)
from router.message_parts.messages import Message, check_messages
from router.template_options.fields import TemplateKwargs
from router.truncation.truncation import TruncationFields

MAX_INPUTS = 2048  # of a request, as in OpenAI's API

TokenIds = Annotated[list[TokenIdField], Field(min_length=1)]
Texts = Annotated[
    str | Annotated[list[str], Field(min_length=1, max_length=MAX_INPUTS)] | None,
    Field(description=f"a text or a list of at most {MAX_INPUTS} texts"),
]


class VectorBody(TruncationFields):
    """Fields of all requests for vectors."""

    model: Label | None = None
    pooling: Literal["last", "mean", "cls"] | None = None
    user: Label | None = None
    priority: Annotated[int, Field(ge=-(1 << 31), lt=1 << 31)] | None = None
    cache_salt: Annotated[str, Field(min_length=1, max_length=MAX_LABEL_CHARS)] | None = None
    add_special_tokens: bool = True


class EmbeddingBody(VectorBody):
    """POST /v1/embeddings, for inputs or, as in vLLM, for one conversation in the model's chat template."""

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
    use_activation: bool | None = None  # the name of `normalize` in later releases of vLLM

    @model_validator(mode="after")
    def _check_input(self) -> EmbeddingBody:
        if None not in (self.normalize, self.use_activation) and self.normalize is not self.use_activation:
            raise InvalidRequestError("normalize and use_activation contradict each other", "use_activation")
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
    def normalizes(self) -> bool:
        return self.normalize is not False and self.use_activation is not False

    @property
    def inputs(self) -> Sequence[str | Sequence[int]]:
        """The inputs, each a text or token ids; empty for a conversation."""
        if self.input is None:
            return []
        if isinstance(self.input, str) or isinstance(self.input[0], int):
            return [self.input]
        return self.input


LEFT_NAMES, RIGHT_NAMES = ("text_1", "queries", "data_1"), ("text_2", "documents", "items", "data_2")


class ScoreBody(VectorBody):
    """POST /v1/score"""

    text_1: Texts = None
    text_2: Texts = None
    queries: Texts = None  # names of text_1 are also queries and data_1; the others are of text_2
    documents: Texts = None
    items: Texts = None
    data_1: Texts = None
    data_2: Texts = None

    @model_validator(mode="after")
    def _check_pairs(self) -> ScoreBody:
        for names in (LEFT_NAMES, RIGHT_NAMES):
            if sum(getattr(self, name) is not None for name in names) != 1:
                listed = ", ".join(names[:-1])
                raise InvalidRequestError(f"give one of {listed} and {names[-1]}", names[0])
        num_left, num_right = len(self.left), len(self.right)
        if num_left not in (1, num_right):
            message = f"text_1 has {num_left} texts and text_2 {num_right}: give one and several, or as many of each"
            raise InvalidRequestError(message, "text_1")
        return self

    @property
    def left(self) -> list[str]:
        return _first(self, LEFT_NAMES)

    @property
    def right(self) -> list[str]:
        return _first(self, RIGHT_NAMES)


class Document(Body):
    """A text in an object, whose other fields are ignored."""

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


def _first(body: ScoreBody, names: Sequence[str]) -> list[str]:
    """Return the texts of the one field among `names` that is given."""
    texts: Any = next(value for name in names if (value := getattr(body, name)) is not None)
    return [texts] if isinstance(texts, str) else list(texts)
