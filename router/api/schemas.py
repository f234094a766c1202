"""Schemas of request bodies and the messages in them: strict pydantic models, and bounds. `parse` applies them.

`router/features.py` adds the fields of optional parts.

Knows nothing of tokens: ranges that need the model (context, vocabulary) are checked in `prompts` and `sampling`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from common.errors import InvalidRequestError

MAX_MESSAGES = 4096
MAX_LIST = 128
MAX_LABEL_CHARS = 512
MAX_TEMPLATE_KWARGS = 16
MAX_CHOICES = 128  # n, best_of, and n times the number of prompts
MAX_PROMPTS = 128
MAX_LOGPROBS = 20
MAX_STOPS = 16
MAX_STOP_CHARS = 512
MAX_SPECULATIVE_TOKENS = 64

Label = Annotated[str, Field(max_length=MAX_LABEL_CHARS)]
TokenIdField = Annotated[int, Field(ge=0, lt=1 << 32)]
StopString = Annotated[str, Field(min_length=1, max_length=MAX_STOP_CHARS)]
TemplateKwargs = Annotated[
    Annotated[dict[Label, bool | int | float | Label | None], Field(max_length=MAX_TEMPLATE_KWARGS)] | None,
    Field(description=f"an object of at most {MAX_TEMPLATE_KWARGS} variables of the model's chat template, each a "
          f"boolean, a number, null or a text of at most {MAX_LABEL_CHARS} characters"),
]  # fmt: skip


class Body(BaseModel):
    """Base of all bodies: no coercion, no unknown fields."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True, protected_namespaces=())
    no_effect: ClassVar[frozenset[str]] = frozenset()  # fields that are checked, and change nothing


class TextPart(Body):
    """Annotations such as cache_control are hints to other servers, and ignored."""

    model_config = ConfigDict(extra="ignore")

    type: Literal["text"]
    text: str


class RefusalPart(Body):
    """What an assistant said instead of an answer."""

    model_config = ConfigDict(extra="ignore")

    type: Literal["refusal"]
    refusal: str

    @property
    def text(self) -> str:
        return self.refusal


class FunctionCall(Body):
    name: Label
    arguments: str
    parsed_arguments: Any = None  # what the openai package has made of them


class ToolCall(Body):
    id: Label
    type: Literal["function"] = "function"
    function: FunctionCall
    index: int | None = None  # from a stream


class Message(Body):
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Annotated[
        str | Annotated[list[TextPart | RefusalPart], Field(max_length=MAX_MESSAGES)] | None,
        Field(description=f"a text or a list of at most {MAX_MESSAGES} parts; only text parts are supported"),
    ] = None
    name: Label | None = None
    tool_calls: Annotated[list[ToolCall], Field(max_length=MAX_LIST)] | None = None
    tool_call_id: Label | None = None
    refusal: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None  # the same by another name
    # Answers of OpenAI's that clients send back as they are have these.
    annotations: Any = None
    audio: None = None
    parsed: Any = None  # what the openai package has made of the content
    function_call: None = None


def check_messages(messages: Sequence[Message]) -> None:
    """Tool results must answer a call, and only an assistant's message may lack content."""
    calls: set[str] = set()
    for index, message in enumerate(messages):
        where = f"messages.{index}"
        if message.role == "assistant":
            calls |= {call.id for call in message.tool_calls or ()}
        elif message.tool_calls:
            raise InvalidRequestError("only assistant messages have tool_calls", f"{where}.tool_calls")
        elif isinstance(message.content, list) and any(isinstance(part, RefusalPart) for part in message.content):
            raise InvalidRequestError("only assistant messages have refusal parts", f"{where}.content")
        may_be_empty = message.role == "assistant" and (message.tool_calls or message.refusal)
        if message.content is None and not may_be_empty:
            raise InvalidRequestError(f"the {message.role} message has no content", f"{where}.content")
        if message.role == "tool" and message.tool_call_id not in calls:
            raise InvalidRequestError("this tool result answers no tool call before it", f"{where}.tool_call_id")


class StreamOptions(Body):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    include_obfuscation: Literal[False] | None = None  # OpenAI's padding against readers of packet sizes


class GenerationBody(Body):
    """Fields that chat completions and completions have in common."""

    model: Label | None = None
    max_tokens: Annotated[int, Field(ge=1, lt=1 << 31)] | None = None
    min_tokens: Annotated[int, Field(ge=0, lt=1 << 31)] | None = None
    temperature: Annotated[float, Field(ge=0, le=100)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=-1, lt=1 << 31)] | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    n: Annotated[int, Field(ge=1, le=MAX_CHOICES)] | None = None
    seed: Annotated[int, Field(ge=-(1 << 63), lt=1 << 63)] | None = None
    stop: Annotated[
        StopString | Annotated[list[StopString], Field(max_length=MAX_STOPS)] | None,
        Field(description=f"a text or at most {MAX_STOPS} texts, each of 1 to {MAX_STOP_CHARS} characters"),
    ] = None
    stop_token_ids: Annotated[list[TokenIdField], Field(max_length=MAX_LIST)] | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    ignore_eos: bool | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    user: Label | None = None
    priority: Annotated[int, Field(ge=-(1 << 31), lt=1 << 31)] | None = None
    cache_salt: Annotated[str, Field(min_length=1, max_length=MAX_LABEL_CHARS)] | None = None
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None
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
    def stops(self) -> list[str]:
        return [self.stop] if isinstance(self.stop, str) else list(self.stop or ())


class ChatCompletionBody(GenerationBody):
    """POST /v1/chat/completions"""

    messages: Annotated[list[Message], Field(min_length=1, max_length=MAX_MESSAGES)]
    max_completion_tokens: Annotated[int, Field(ge=1, lt=1 << 31)] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    return_prompt_text: bool | None = None
    chat_template_kwargs: TemplateKwargs = None
    reasoning_effort: Label | None = None
    verbosity: Label | None = None

    @model_validator(mode="after")
    def _check_chat(self) -> ChatCompletionBody:
        if self.top_logprobs and not self.logprobs:
            raise InvalidRequestError("top_logprobs needs logprobs: true", "top_logprobs")
        if self.continue_final_message and self.add_generation_prompt:
            message = "continue_final_message and add_generation_prompt exclude each other"
            raise InvalidRequestError(message, "continue_final_message")
        if self.max_completion_tokens and self.min_tokens and self.min_tokens > self.max_completion_tokens:
            raise InvalidRequestError("min_tokens must not exceed max_completion_tokens", "min_tokens")
        check_messages(self.messages)
        return self

    @property
    def template_variables(self) -> dict[str, Any]:
        """Variables of the chat template, among them what the client advises the model, which few templates read."""
        advice = {"reasoning_effort": self.reasoning_effort, "verbosity": self.verbosity}
        given = {name: value for name, value in advice.items() if value is not None}
        return given | (self.chat_template_kwargs or {})


class CompletionBody(GenerationBody):
    """POST /v1/completions"""

    prompt: Annotated[
        str
        | Annotated[list[str], Field(min_length=1, max_length=MAX_PROMPTS)]
        | Annotated[list[TokenIdField], Field(min_length=1)]
        | Annotated[
            list[Annotated[list[TokenIdField], Field(min_length=1)]], Field(min_length=1, max_length=MAX_PROMPTS)
        ],
        Field(description=f"a text, a list of token ids, or a list of at most {MAX_PROMPTS} of either; none empty"),
    ]
    max_tokens: Annotated[int, Field(ge=0, lt=1 << 31)] | None = None
    best_of: Annotated[int, Field(ge=1, le=MAX_CHOICES)] | None = None
    echo: bool | None = None
    add_special_tokens: bool | None = None
    logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None

    @model_validator(mode="after")
    def _check_completion(self) -> CompletionBody:
        n = self.n or 1
        if self.max_tokens == 0 and not self.echo:
            raise InvalidRequestError("max_tokens must be at least 1, or 0 together with echo: true", "max_tokens")
        if self.best_of is not None and self.best_of < n:
            raise InvalidRequestError("best_of must not be smaller than n", "best_of")
        if self.best_of is not None and self.best_of > n and self.stream:
            raise InvalidRequestError("best_of cannot be streamed", "best_of")
        if len(self.prompts) * (self.best_of or n) > MAX_CHOICES:
            raise InvalidRequestError(f"prompts times choices must not exceed {MAX_CHOICES}", "n")
        return self

    @property
    def prompts(self) -> Sequence[str | Sequence[int]]:
        """All prompts of the request, each a text or token ids."""
        if isinstance(self.prompt, str) or isinstance(self.prompt[0], int):
            return [self.prompt]
        return self.prompt
