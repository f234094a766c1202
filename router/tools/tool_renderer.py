"""The JSON of chat completions with tool calls."""

from __future__ import annotations

from typing import Any

from common.text.tokenizer import Tokenizer
from router.api.chat_renderer import ChatRenderer
from router.api.render import RenderOptions
from router.api.results import ChoiceResult, Usage, merged_calls
from router.api.text import DeltaToolCall, Update


class ToolChatRenderer(ChatRenderer):
    """Answers to requests with tools."""

    first_content = None  # there may be calls alone

    def __init__(self, options: RenderOptions, tokenizer: Tokenizer) -> None:
        super().__init__(options, tokenizer)
        self._callers: set[int] = set()  # choices that have made calls

    def chunk(self, index: int, update: Update | ChoiceResult, usage: Usage) -> bytes:
        if not update.tool_calls:
            return super().chunk(index, update, usage)
        self._callers.add(index)
        return self._full_chunk(index, update, usage)

    def _delta(self, update: Update | ChoiceResult) -> dict[str, Any]:
        delta: dict[str, Any] = {"content": update.text} if update.text else {}
        if update.tool_calls:
            delta["tool_calls"] = [
                {"index": call.index, **(_tool_call(call) if call.name else _more_arguments(call))}
                for call in merged_calls(update.tool_calls)
            ]
        return delta

    def _finish_reason(self, index: int, update: Update | ChoiceResult) -> str | None:
        return "tool_calls" if update.finish_reason == "stop" and index in self._callers else update.finish_reason

    def _choice(self, result: ChoiceResult) -> dict[str, Any]:
        choice = super()._choice(result)
        if result.tool_calls:
            choice["message"]["content"] = result.text or None
            choice["message"]["tool_calls"] = [_tool_call(call) for call in merged_calls(result.tool_calls)]
            if result.finish_reason == "stop":
                choice["finish_reason"] = "tool_calls"
        return choice


def _tool_call(call: DeltaToolCall) -> dict[str, Any]:
    function = {"name": call.name, "arguments": call.arguments}
    return {"id": call.call_id, "type": "function", "function": function}


def _more_arguments(call: DeltaToolCall) -> dict[str, Any]:
    return {"function": {"arguments": call.arguments}}
