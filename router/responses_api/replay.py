"""The events of a stored response, as they were streamed, or with one delta per item if it was not. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from common.tools.call_deltas import DeltaToolCall
from router.api.text import Update
from router.responses_api.output import DeltaLengths, Event, Output
from router.responses_api.renderer import event_bytes, first_events, last_events
from router.responses_api.translation import chat_name


def replay(response: dict[str, Any], delta_lengths: DeltaLengths, first: int) -> Iterator[bytes]:
    """Yield the events from sequence number `first` on."""
    for number, event in enumerate(_events(response, delta_lengths)):
        if number >= first:
            yield event_bytes(event, number)


def _events(response: dict[str, Any], delta_lengths: DeltaLengths) -> Iterator[Event]:
    begun: dict[str, Any] = {"error": None, "incomplete_details": None, "output": [], "usage": None}
    yield from first_events(response | begun)
    ids = iter([item["id"] for item in response["output"]])
    calls = [item for item in response["output"] if item.get("namespace")]
    spaces = {_name(item): {"namespace": item["namespace"], "name": item["name"]} for item in calls}
    output = Output(spaces, lambda _: next(ids))
    for item, lengths in zip(response["output"], delta_lengths, strict=True):
        for update in _updates(item, lengths):
            yield from output.add(update)
    yield from output.finish(response["status"] == "completed")
    yield from last_events(response)


def _name(call: dict[str, Any]) -> str:
    return chat_name(call.get("namespace"), call["name"])


def _updates(item: dict[str, Any], lengths: list[int]) -> Iterator[Update]:
    """Yield the updates that an item was built from, one delta each."""
    is_call = item["type"] == "function_call"
    if is_call:
        yield Update("", [], tool_calls=[DeltaToolCall(0, item["call_id"], _name(item), "")])
    text, begin = item["arguments"] if is_call else item["content"][0]["text"], 0
    for length in lengths:
        delta = text[begin : begin + length]
        begin += length
        if is_call:
            yield Update("", [], tool_calls=[DeltaToolCall(0, "", "", delta)])
        elif item["type"] == "reasoning":
            yield Update("", [], reasoning=delta)
        else:
            yield Update(delta, [])
