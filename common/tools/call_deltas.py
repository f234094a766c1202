"""Tool calls of an answer, as they arrive in pieces."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace


@dataclass(frozen=True, slots=True)
class DeltaToolCall:
    """The beginning of a tool call, or more of its arguments."""

    index: int  # index of the call in its choice
    call_id: str  # set, as the name, in the first delta of a call, else empty
    name: str
    arguments: str  # the next characters of the JSON text


def merged_calls(deltas: Sequence[DeltaToolCall]) -> list[DeltaToolCall]:
    """Merge the deltas of each call into one, as clients expect in a chunk or a message."""
    by_index: dict[int, list[DeltaToolCall]] = {}
    for delta in deltas:
        by_index.setdefault(delta.index, []).append(delta)
    return [
        replace(parts[0], arguments="".join(part.arguments for part in parts)) if len(parts) > 1 else parts[0]
        for parts in by_index.values()
    ]
