"""Tool calls as a part of chat answers: taken out of the text, and put into the JSON of messages."""

from __future__ import annotations

from typing import Any

from common.tools.call_deltas import DeltaToolCall, merged_calls
from common.tools.tool_format import new_call_id
from common.tools.tool_parser import CallDelta, ToolCallParser
from router.api.text import ChoiceResult, Update
from router.tools.tool_use import ToolUse


class ToolPart:
    """The tool calls in the answers to one request."""

    def __init__(self, use: ToolUse) -> None:
        self._use = use
        self._callers: set[int] = set()  # choices that have made calls

    @property
    def shown(self) -> frozenset[int]:
        return self._use.shown

    def grammar(self, answer: str, prompt_token_ids: list[int]) -> str:
        return answer  # it already includes the calls

    def stage(self, prompt_token_ids: list[int]) -> ToolStage:
        num_before = 0 if self._use.begin_id is None else prompt_token_ids.count(self._use.begin_id)
        return ToolStage(self._use, num_before)

    def delta(self, index: int, update: Update | ChoiceResult) -> dict[str, Any]:
        if not update.tool_calls:
            return {}
        self._callers.add(index)
        calls = [
            {"index": call.index, **(_tool_call(call) if call.name else _more_arguments(call))}
            for call in merged_calls(update.tool_calls)
        ]
        return {"tool_calls": calls}

    def message(self, result: ChoiceResult) -> dict[str, Any]:
        if not result.tool_calls:
            return {}
        self._callers.add(result.index)
        calls = [_tool_call(call) for call in merged_calls(result.tool_calls)]
        return {"content": result.text or None, "tool_calls": calls}

    def finish_reason(self, index: int, reason: str | None) -> str | None:
        return "tool_calls" if reason == "stop" and index in self._callers else reason


class ToolStage:
    """Takes the tool calls out of one choice's text. num_before: calls in the prompt, where a token begins them."""

    def __init__(self, use: ToolUse, num_before: int) -> None:
        self._parser = ToolCallParser(
            use.written, use.functions, use.is_parallel, use.is_forced, has_variants=not use.is_json
        )
        self._written, self._num_before = use.written, num_before
        self._num_calls = 0

    def take(self, update: Update) -> None:
        update.text, deltas = self._parser.push(update.text)
        if self._parser.has_ended:
            update.finish_reason = "stop"
        if update.finish_reason == "stop":
            deltas += self._parser.end_arguments()
        update.tool_calls = [self._numbered(delta) for delta in deltas]
        if update.finish_reason is not None:
            update.text += self._parser.finish()

    def _numbered(self, delta: CallDelta) -> DeltaToolCall:
        call_id = ""
        if delta.name:
            call_id = new_call_id(self._written, delta.name, self._num_before + self._num_calls)
            self._num_calls += 1
        return DeltaToolCall(self._num_calls - 1, call_id, delta.name, delta.arguments)


def _tool_call(call: DeltaToolCall) -> dict[str, Any]:
    function = {"name": call.name, "arguments": call.arguments}
    return {"id": call.call_id, "type": "function", "function": function}


def _more_arguments(call: DeltaToolCall) -> dict[str, Any]:
    return {"function": {"arguments": call.arguments}}
