"""Schemas of request bodies and their messages: strict pydantic models, and bounds.

`router/http/body.py` validates bodies by them, `router/features.py` adds the fields of wings. Knows nothing of
tokens: `prompts` and `sampling` check ranges that depend on the model (context, vocabulary).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from common.errors import InvalidRequestError

MAX_MESSAGES = 4096
MAX_LIST = 128
MAX_LABEL_CHARS = 512
MAX_LOGPROBS = 20
MAX_STOPS = 16
MAX_STOP_CHARS = 512
MAX_SPECULATIVE_TOKENS = 64

Label = Annotated[str, Field(max_length=MAX_LABEL_CHARS)]
TokenIdField = Annotated[int, Field(ge=0, lt=1 << 32)]
StopString = Annotated[str, Field(min_length=1, max_length=MAX_STOP_CHARS)]


class Body(BaseModel):
    """Base of all bodies: no coercion, no unknown fields."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True, protected_namespaces=())
    no_effect: ClassVar[frozenset[str]] = frozenset()  # fields that are checked, but change nothing


class TextPart(Body):
    """Annotations such as cache_control are hints to other servers, and ignored."""

    model_config = ConfigDict(extra="ignore")

    type: Literal["text"]
    text: str


CONTENT = Field(description=f"a text or a list of at most {MAX_MESSAGES} parts; only text parts are supported")


class Message(Body):
    """A message of a conversation: its text. `router/message_parts` adds other parts."""

    role: Literal["system", "developer", "user", "assistant"]
    content: Annotated[str | Annotated[list[TextPart], Field(max_length=MAX_MESSAGES)] | None, CONTENT] = None
    name: Label | None = None

    @property
    def lacks_content(self) -> bool:
        return self.content is None

    def for_template(self) -> dict[str, Any]:
        """Return the form that chat templates expect: content is a string."""
        content = self.content or ""
        text = content if isinstance(content, str) else "\n".join(part.text for part in content)
        role = "system" if self.role == "developer" else self.role
        return {"role": role, "content": text} | ({} if self.name is None else {"name": self.name})


def check_messages(messages: Sequence[Message]) -> None:
    """Raise InvalidRequestError for a message without content."""
    for index, message in enumerate(messages):
        if message.lacks_content:
            raise InvalidRequestError(f"the {message.role} message has no content", f"messages.{index}.content")


class StreamOptions(Body):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    include_obfuscation: Literal[False] | None = None  # OpenAI's padding, which hides packet sizes


class GenerationBody(Body):
    """Fields of all requests for text: chats, and those of `router/completions_api`."""

    id_prefix: ClassVar[str] = "chatcmpl-"
    prompt_field: ClassVar[str] = "messages"
    default_tokens: ClassVar[int | None] = None  # default max_tokens; None: up to the context length
    may_exceed_context: ClassVar[bool] = False  # whether an answer with more max_tokens ends where the context does

    model: Label | None = None
    max_tokens: Annotated[int, Field(ge=1, lt=1 << 31)] | None = None
    min_tokens: Annotated[int, Field(ge=0, lt=1 << 31)] | None = None
    temperature: Annotated[float, Field(ge=0, le=100)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=-1, lt=1 << 31)] | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    seed: Annotated[int, Field(ge=-(1 << 63), lt=1 << 63)] | None = None
    stop_token_ids: Annotated[list[TokenIdField], Field(max_length=MAX_LIST)] | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    ignore_eos: bool | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    user: Label | None = None
    priority: Annotated[int, Field(ge=-(1 << 31), lt=1 << 31)] | None = None
    cache_salt: Annotated[str, Field(min_length=1, max_length=MAX_LABEL_CHARS)] | None = None
    num_speculative_tokens: Annotated[int, Field(ge=0, le=MAX_SPECULATIVE_TOKENS)] | None = None
    session_id: Label | None = None

    @model_validator(mode="after")
    def _check(self) -> GenerationBody:
        if self.stream_options is not None and not self.stream:
            raise InvalidRequestError("stream_options needs stream: true", "stream_options")
        if self.min_tokens and self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise InvalidRequestError("min_tokens must not exceed max_tokens", "min_tokens")
        return self

    @property
    def continues_prompt(self) -> bool:
        """Whether the answer's text continues the prompt's."""
        return False

    @property
    def asked_tokens(self) -> tuple[int | None, str]:
        """The maximum number of tokens of an answer, and the field that gives it."""
        return self.max_tokens, "max_tokens"

    @property
    def num_logprobs(self) -> int | None:
        """Number of alternatives to each token to return log-probabilities for; None: no log-probabilities at all."""
        return None

    @property
    def num_prompt_logprobs(self) -> int | None:
        """Like num_logprobs, for the prompt's tokens."""
        return None


class ChatCompletionBody(GenerationBody):
    """POST /v1/chat/completions"""

    messages: Annotated[list[Message], Field(min_length=1, max_length=MAX_MESSAGES)]
    max_completion_tokens: Annotated[int, Field(ge=1, lt=1 << 31)] | None = None

    @model_validator(mode="after")
    def _check_chat(self) -> ChatCompletionBody:
        if self.max_completion_tokens and self.min_tokens and self.min_tokens > self.max_completion_tokens:
            raise InvalidRequestError("min_tokens must not exceed max_completion_tokens", "min_tokens")
        check_messages(self.messages)
        return self

    @property
    def asked_tokens(self) -> tuple[int | None, str]:
        asked = self.max_completion_tokens
        return super().asked_tokens if asked is None else (asked, "max_completion_tokens")
