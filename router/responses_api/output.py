"""Output items of a response and their events, built from a choice's updates. Pure except for ids."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping
from typing import Any

from common.tools.call_deltas import DeltaToolCall, merged_calls
from router.api.text import ChoiceResult, Update

Event = dict[str, Any]
DeltaLengths = list[list[int]]
"""For each item, the number of characters in each of its deltas."""

_PREFIXES = {"reasoning": "rs", "message": "msg", "function_call": "fc"}


def _new_id(item_type: str) -> str:
    return f"{_PREFIXES[item_type]}_{secrets.token_hex(16)}"


class Output:
    """Builds items (reasoning, a message, function calls) in the order in which they arrive."""

    def __init__(self, namespaces: Mapping[str, dict[str, str]], new_id: Callable[[str], str] = _new_id) -> None:
        """namespaces: see `namespaces_of`. new_id: returns a new id for an item type."""
        self.items: list[dict[str, Any]] = []
        self.delta_lengths: DeltaLengths = []
        self._namespaces = namespaces
        self._new_id = new_id
        self._is_open = False  # the last item is still growing

    def add(self, update: Update | ChoiceResult) -> list[Event]:
        """Take an update; return its events."""
        events: list[Event] = []
        if update.reasoning:
            events += self._text("reasoning", "reasoning_text", update.reasoning)
        if update.text:
            events += self._text("message", "output_text", update.text)
        for call in merged_calls(update.tool_calls):
            events += self._call(call)
        return events

    def finish(self, is_complete: bool = True) -> list[Event]:
        """Close the open item and return its events."""
        if not self._is_open:
            return []
        self._is_open = False
        item = self.items[-1]
        item["status"] = "completed" if is_complete else "incomplete"
        place = self._place(item)
        events: list[Event] = []
        if item["type"] == "function_call":
            done = {"arguments": item["arguments"], "name": item["name"]}
            events.append({"type": "response.function_call_arguments.done", **place, **done})
        else:
            [part] = item["content"]
            kind = part["type"]
            logprobs = _LOGPROBS[kind]
            events.append({"type": f"response.{kind}.done", **place, **_FIRST, "text": part["text"], **logprobs})
            events.append({"type": "response.content_part.done", **place, **_FIRST, "part": dict(part)})
        events.append({"type": "response.output_item.done", "output_index": len(self.items) - 1, "item": _copy(item)})
        return events

    # -- items -------------------------------------------------------------------------------------------------

    def _text(self, item_type: str, kind: str, text: str) -> list[Event]:
        events: list[Event] = []
        if not (self._is_open and self.items[-1]["type"] == item_type):
            events = self._begin(
                {"id": self._new_id(item_type), "type": item_type, "content": [], **_EXTRA[item_type]}
            )
            part = {"type": kind, "text": "", **_PART_EXTRA[kind]}
            place = self._place(self.items[-1])
            events.append({"type": "response.content_part.added", **place, **_FIRST, "part": dict(part)})
            self.items[-1]["content"].append(part)
        item = self.items[-1]
        item["content"][0]["text"] += text
        self.delta_lengths[-1].append(len(text))
        logprobs = _LOGPROBS[kind]
        events.append({"type": f"response.{kind}.delta", **self._place(item), **_FIRST, "delta": text, **logprobs})
        return events

    def _call(self, call: DeltaToolCall) -> list[Event]:
        events: list[Event] = []
        if call.name:
            events = self._begin(
                {
                    "id": self._new_id("function_call"), "type": "function_call", "call_id": call.call_id,
                    **self._namespaces.get(call.name, {"name": call.name}), "arguments": "",
                }
            )  # fmt: skip
        item = self.items[-1]
        if call.arguments:
            item["arguments"] += call.arguments
            self.delta_lengths[-1].append(len(call.arguments))
            delta = {"delta": call.arguments}
            events.append({"type": "response.function_call_arguments.delta", **self._place(item), **delta})
        return events

    def _begin(self, item: dict[str, Any]) -> list[Event]:
        events = self.finish()
        item["status"] = "in_progress"
        self.items.append(item)
        self.delta_lengths.append([])
        self._is_open = True
        added = {"output_index": len(self.items) - 1, "item": _copy(item)}
        return [*events, {"type": "response.output_item.added", **added}]

    def _place(self, item: dict[str, Any]) -> dict[str, Any]:
        return {"item_id": item["id"], "output_index": len(self.items) - 1}


_FIRST = {"content_index": 0}
_EXTRA: dict[str, dict[str, Any]] = {"reasoning": {"summary": []}, "message": {"role": "assistant"}}
_PART_EXTRA: dict[str, dict[str, Any]] = {"reasoning_text": {}, "output_text": {"annotations": []}}
_LOGPROBS: dict[str, dict[str, Any]] = {"reasoning_text": {}, "output_text": {"logprobs": []}}


def _copy(item: dict[str, Any]) -> dict[str, Any]:
    content = {"content": [dict(part) for part in item["content"]]} if "content" in item else {}
    return {**item, **content}
