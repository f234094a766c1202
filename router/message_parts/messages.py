"""Schemas of messages with tool calls and results, and of answers that clients send back."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Annotated, Any, Literal

import orjson
from pydantic import ConfigDict, Field, model_validator

from common.errors import InvalidRequestError
from router.api import schemas
from router.api.schemas import CONTENT, MAX_LIST, MAX_MESSAGES, Body, Label, TextPart


class RefusalPart(Body):
    """A refusal of an assistant, in place of an answer."""

    model_config = ConfigDict(extra="ignore")

    type: Literal["refusal"]
    refusal: str

    @property
    def text(self) -> str:
        return self.refusal


class Arguments(dict[str, Any]):
    """A call's arguments: an object, and its JSON where a template joins it to a text, as DeepSeek-V3's does."""

    def __add__(self, text: str) -> str:
        return json.dumps(self, ensure_ascii=False) + text

    def __radd__(self, text: str) -> str:
        return text + json.dumps(self, ensure_ascii=False)


class FunctionCall(Body):
    name: Label
    arguments: str
    parsed_arguments: Any = None  # added by the openai package

    def for_template(self) -> dict[str, Any]:
        """Return the form that chat templates expect: arguments are an object."""
        if not self.arguments.strip():  # how some models and clients write that there are none
            return {"name": self.name, "arguments": Arguments()}
        try:
            arguments = orjson.loads(self.arguments)
        except orjson.JSONDecodeError:
            arguments = self.arguments  # not JSON, as a model may have written; the template shows it as it is
        return {"name": self.name, "arguments": Arguments(arguments) if isinstance(arguments, dict) else arguments}


class ToolCall(Body):
    id: Label
    type: Literal["function"] = "function"
    function: FunctionCall
    index: int | None = None  # present in calls from a stream


Role = Literal["system", "developer", "user", "assistant", "tool"]
Content = Annotated[str | Annotated[list[TextPart | RefusalPart], Field(max_length=MAX_MESSAGES)] | None, CONTENT]


class Message(schemas.Message):
    role: Role  # type: ignore[assignment]  # more roles
    content: Content = None  # type: ignore[assignment]  # more kinds of parts
    tool_calls: Annotated[list[ToolCall], Field(max_length=MAX_LIST)] | None = None
    tool_call_id: Label | None = None
    refusal: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None  # another name of reasoning_content
    # Fields of OpenAI's answers, which clients send back unchanged.
    annotations: Any = None
    audio: None = None
    parsed: Any = None  # the content as parsed by the openai package
    function_call: None = None

    @property
    def lacks_content(self) -> bool:
        may_be_empty = self.role == "assistant" and (self.tool_calls or self.refusal)
        return self.content is None and not may_be_empty

    def for_template(self) -> dict[str, Any]:
        plain = super().for_template()
        if self.content is None:
            plain["content"] = self.refusal or ""
        reasoning = self.reasoning if self.reasoning_content is None else self.reasoning_content
        if reasoning is not None:
            plain["reasoning_content"] = reasoning
            if not (self.tool_calls and plain["content"]):  # gpt-oss's template refuses both in a message with calls
                plain["thinking"] = reasoning  # its name there
        if self.tool_call_id is not None:
            plain["tool_call_id"] = self.tool_call_id
        if self.tool_calls:
            plain["tool_calls"] = [
                {"id": call.id, "type": "function", "function": call.function.for_template()}
                for call in self.tool_calls
            ]
        return plain


class MessageFields(Body):
    """Request fields of chats."""

    messages: Annotated[list[Message], Field(min_length=1, max_length=MAX_MESSAGES)]

    @model_validator(mode="after")
    def _check_messages(self) -> MessageFields:
        check_messages(self.messages)
        return self


def check_messages(messages: Sequence[Message]) -> None:
    """Raise InvalidRequestError for a tool result without its call, or a refusal or calls from a non-assistant."""
    schemas.check_messages(messages)
    calls: set[str] = set()
    for index, message in enumerate(messages):
        where = f"messages.{index}"
        if message.role == "assistant":
            calls |= {call.id for call in message.tool_calls or ()}
        elif message.tool_calls:
            raise InvalidRequestError("only assistant messages have tool_calls", f"{where}.tool_calls")
        elif isinstance(message.content, list) and any(isinstance(part, RefusalPart) for part in message.content):
            raise InvalidRequestError("only assistant messages have refusal parts", f"{where}.content")
        if message.role == "tool" and message.tool_call_id not in calls:
            raise InvalidRequestError("this tool result answers no tool call before it", f"{where}.tool_call_id")
