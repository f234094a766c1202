"""Schemas of chat messages, and the base of all request bodies."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field

from common.errors import InvalidRequestError

MAX_MESSAGES = 4096
MAX_LIST = 128
MAX_LABEL_CHARS = 512

MAX_TEMPLATE_KWARGS = 16

Label = Annotated[str, Field(max_length=MAX_LABEL_CHARS)]

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
