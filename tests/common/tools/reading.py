"""Calls parsed from a text in pieces, as a client adds them up."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from hypothesis import strategies as st

from common.tools.tool_parser import CallDelta, ToolCallParser, ToolFormat

Call = tuple[str, str]  # a name and arguments
WEATHER_SCHEMA = {
    "type": "object",
    "properties": {
        "city": {"type": "string"}, "days": {"type": "integer"}, "now": {"type": "boolean"}, "at": {"type": "array"},
    },
}  # fmt: skip
FUNCTIONS: dict[str, Any] = {"get_weather": WEATHER_SCHEMA, "get_time": {"type": "object", "properties": {}}}


def added_up(deltas: Iterable[CallDelta]) -> list[Call]:
    calls: list[Call] = []
    for delta in deltas:
        if delta.name:
            calls.append((delta.name, delta.arguments))
        else:
            assert delta.arguments
            calls[-1] = calls[-1][0], calls[-1][1] + delta.arguments
    return calls


def parsed(
    pieces: Iterable[str], written: ToolFormat, functions: Mapping[str, Any] = FUNCTIONS, **options: bool
) -> tuple[str, list[Call]]:
    """Return text and calls."""
    parser = ToolCallParser(written, functions, **options)
    found = [parser.push(piece) for piece in pieces]
    shown = "".join(text for text, _ in found) + parser.finish()
    deltas = [delta for _, deltas in found for delta in deltas]
    return shown, added_up(deltas + parser.end_arguments())


def in_pieces(text: str, data: st.DataObject) -> Sequence[str]:
    """Split the text anywhere."""
    cuts = sorted(data.draw(st.sets(st.integers(0, len(text)), max_size=20)))
    return [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
