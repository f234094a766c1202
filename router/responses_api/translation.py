"""Converts a Responses request to a chat completion's fields, and output items to messages. Pure."""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from typing import Any

from common.errors import InvalidRequestError
from router.responses_api.schemas import (
    AnyItem,
    AnyTool,
    ChatFields,
    FunctionCallItem,
    FunctionOutputItem,
    FunctionTool,
    ItemRefusal,
    ItemText,
    MessageItem,
    NamedFunctionTool,
    NamespaceTool,
    ReasoningItem,
    ResponsesBody,
    TextFormat,
)

Message = dict[str, Any]
# Patterns of a chat completion's fields, and the fields of this API that they come from.
_NAMES = (
    (r"^response_format(\.json_schema)?", "text.format"),
    (r"^max_tokens$", "max_output_tokens"),
    (r"^reasoning_effort$", "reasoning.effort"),
    (r"^verbosity$", "text.verbosity"),
)


def chat_fields(body: ResponsesBody, messages: Sequence[Message]) -> dict[str, Any]:
    """Return the chat completion's body for a request. Raises InvalidRequestError.

    messages: the conversation without instructions, which apply to one response only.
    """
    first = [{"role": "system", "content": body.instructions}] if body.instructions else []
    fields: dict[str, Any] = {
        "model": body.model,
        "messages": [*first, *messages],
        "max_tokens": body.max_output_tokens,
        "temperature": body.temperature,
        "top_p": body.top_p,
        "stream": body.stream or body.background,
        "user": body.user,
        **body.model_dump(include=set(ChatFields.model_fields), exclude_none=True),
    }
    if body.tools:
        fields["tools"] = [
            {"type": "function", "function": {**tool.model_dump(exclude={"type"}, exclude_none=True), "name": name}}
            for _, name, tool in _functions(body.tools)
        ]
        fields["parallel_tool_calls"] = body.parallel_tool_calls
    if isinstance(body.tool_choice, NamedFunctionTool):
        fields["tool_choice"] = {"type": "function", "function": {"name": body.tool_choice.name}}
    elif body.tool_choice is not None:
        fields["tool_choice"] = body.tool_choice
    if body.reasoning is not None:
        fields["reasoning_effort"] = body.reasoning.effort
    if body.text is not None:
        fields["verbosity"] = body.text.verbosity
        if body.text.format is not None:
            fields["response_format"] = _response_format(body.text.format)
    return fields


def chat_name(namespace: str | None, name: str) -> str:
    """Return the name of a function in the chat."""
    return f"{namespace}__{name}" if namespace else name


def namespaces_of(body: ResponsesBody) -> dict[str, dict[str, str]]:
    """Map the chat's name of each function in a namespace to the fields that name it in calls."""
    spaces = [space for space in body.tools or () if isinstance(space, NamespaceTool)]
    return {
        chat_name(space.name, tool.name): {"namespace": space.name, "name": tool.name}
        for space in spaces
        for tool in space.tools
    }


def _functions(tools: Sequence[AnyTool]) -> Iterator[tuple[str, str, FunctionTool]]:
    """Yield each function with its field of the request and its name in the chat."""
    for index, tool in enumerate(tools):
        if isinstance(tool, FunctionTool):
            yield f"tools.{index}", tool.name, tool
            continue
        for place, function in enumerate(tool.tools):
            yield f"tools.{index}.tools.{place}", chat_name(tool.name, function.name), function


def _response_format(wanted: TextFormat) -> dict[str, Any]:
    if wanted.type != "json_schema":
        return {"type": wanted.type}
    if wanted.content is None or wanted.name is None:
        raise InvalidRequestError("text.format of type json_schema needs a name and a schema", "text.format")
    schema = {"name": wanted.name, "schema": wanted.content, "strict": bool(wanted.strict)}
    return {"type": "json_schema", "json_schema": schema}


def client_field(body: ResponsesBody, num_earlier: int, param: str) -> str:
    """Return the request's field for a field of the chat completion. num_earlier: messages of earlier responses."""
    head, *path = param.split(".")
    if head == "messages":
        index = int(path[0]) - num_earlier - bool(body.instructions) if path else -1
        return "input" if isinstance(body.input, str) or index < 0 else f"input.{_item_of(body.input, index)}"
    if head == "tools" and path:
        fields = [field for field, *_ in _functions(body.tools or ())]
        return ".".join([fields[int(path[0])], *path[2:]])
    for pattern, name in _NAMES:
        param = re.sub(pattern, name, param)
    return param


def _item_of(items: Sequence[AnyItem], index: int) -> int:
    """Return the index of the item that begins the message with that index."""
    return bisect_right(range(len(items)), index, key=lambda last: len(messages_of(items[: last + 1])))


def messages_of(given: str | Sequence[AnyItem]) -> list[Message]:
    """Return the chat messages of input items. Adjacent assistant items become one message, as templates expect."""
    if isinstance(given, str):
        return [{"role": "user", "content": given}]
    messages: list[Message] = []
    for item in given:
        match item:
            case MessageItem(role="assistant"):
                said = _assistant(messages)
                said["content"] = said.get("content", "") + _text(item.content)
            case MessageItem():
                messages.append({"role": item.role, "content": _text(item.content)})
            case FunctionCallItem():
                call = {"name": chat_name(item.namespace, item.name), "arguments": item.arguments}
                calls = _assistant(messages).setdefault("tool_calls", [])
                calls.append({"id": item.call_id, "type": "function", "function": call})
            case FunctionOutputItem():
                messages.append({"role": "tool", "tool_call_id": item.call_id, "content": _text(item.output)})
            case ReasoningItem():
                text = "\n".join(part.text for part in item.content or ())
                if text:
                    messages.append({"role": "assistant", "reasoning_content": text})
    for message in messages:
        if message["role"] == "assistant" and "tool_calls" not in message:
            message.setdefault("content", "")
    return messages


def _assistant(messages: list[Message]) -> Message:
    """Return the assistant message under construction, starting one if there is none."""
    if not messages or messages[-1]["role"] != "assistant":
        messages.append({"role": "assistant"})
    return messages[-1]


def _text(content: str | Sequence[ItemText | ItemRefusal]) -> str:
    return content if isinstance(content, str) else "\n".join(part.text for part in content)
