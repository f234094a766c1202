"""Finds the JSON in an answer whose items must differ: the whole answer, its part after reasoning, or tool arguments.

Works on the bytes of an answer's tokens. A special token is SPECIAL and its text, so ordinary text cannot look like
it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

from common.grammar.grammar import Marks
from common.grammar.json_schemas import resolved
from common.grammar.unique_items import UNIQUE, State, UniqueItems

SPECIAL = b"\xff"  # does not occur in UTF-8
_TEXT, _REASONING, _START = -1, -2, -3  # places of states outside of JSON


class UniquePlaces:
    """The JSON in one grammar's answers."""

    def __init__(self, places: Mapping[bytes, UniqueItems], marks: tuple[bytes, bytes] | None) -> None:
        """places: by the text before the JSON; empty: the answer is JSON. marks: begin and end of reasoning before
        it."""
        self._items = list(places.values())
        self._openings = _Finder(list(places))
        self._begin, end = marks or (b"", b"")
        self._end = _Finder([end])
        self._answer = State() if b"" in places else State(place=_TEXT)
        begun = State(place=_START if self._begin else _REASONING)
        self.first = self._answer if marks is None else begun

    def after(self, state: State, data: bytes) -> State | None:
        """Return the state after `data`; None: an item would be repeated, or could only end as a repetition."""
        while True:
            if state.place >= 0:
                found, rest = self._items[state.place].after(state, data)
                if rest is None or found is None or self._answer.place == 0:
                    return found
                state, data = State(place=_TEXT), rest
                continue
            text = state.tail + data
            if state.place == _START:
                if self._begin.startswith(text) and text != self._begin:
                    return State(place=_START, tail=text)
                is_begun = text.startswith(self._begin)
                state = State(place=_REASONING) if is_begun else self._answer
                data = text.removeprefix(self._begin)
                continue
            finder = self._end if state.place == _REASONING else self._openings
            place, data = finder.search(text)
            if place is None:
                return state._replace(tail=data)
            state = self._answer if finder is self._end else State(place=place)

    def is_apart(self, state: State) -> bool:
        """Whether no single token can begin JSON and write two items of it, because the text before JSON has not
        begun."""
        finder = self._end if state.place == _REASONING else self._openings
        return state.place < 0 and not (state.place == _START or finder.has_begun(state.tail))


class _Finder:
    """Finds the first of several texts."""

    def __init__(self, texts: Sequence[bytes]) -> None:
        self._texts = texts
        self._pattern = re.compile(b"|".join(b"(%b)" % re.escape(text) for text in texts))
        self._longest = max(map(len, texts))

    def search(self, text: bytes) -> tuple[int | None, bytes]:
        """Return the index of the text found and what follows it; or None and an end that may begin a text."""
        found = self._pattern.search(text)
        if found is None:
            return None, text[max(len(text) - self._longest + 1, 0) :]
        return (found.lastindex or 1) - 1, text[found.end() :]

    def has_begun(self, tail: bytes) -> bool:
        return any(tail.endswith(text[:count]) for text in self._texts for count in range(1, len(text)))


@lru_cache(maxsize=16)
def unique_places(grammar: str, special: tuple[str, ...] = ()) -> UniquePlaces | None:
    """Return the arrays of a grammar whose items must differ, which the grammar cannot express; None: there are none.

    special: texts of the model's special tokens.
    """
    if UNIQUE not in grammar:
        return None
    longest_first = sorted(filter(None, special), key=len, reverse=True)
    pattern = re.compile("|".join(map(re.escape, longest_first)) or r"(?!)")

    def written(text: str) -> bytes:
        at, parts = 0, b""
        for found in pattern.finditer(text):
            parts += text[at : found.start()].encode() + SPECIAL + found[0].encode()
            at = found.end()
        return parts + text[at:].encode()

    marks: Marks | None = None
    kind, _, text = grammar.partition(":")
    if kind == "after":
        _, grammar, marks = json.loads(text)
        kind, _, text = grammar.partition(":")
    if kind == "json_schema":
        places = {"": json.loads(text)}
    elif kind == "places":
        head, _, lark = text.partition("\n")
        rules = dict(line.split(": %json ", 1) for line in lark.splitlines() if ": %json " in line)
        places = {opening: json.loads(rules[rule]) for opening, rule in json.loads(head).items()}
    else:
        return None
    items = {written(opening): _items(schema) for opening, schema in places.items()}
    return UniquePlaces(items, None if marks is None else (written(marks[0]), written(marks[1])))


def _items(schema: Mapping[str, Any]) -> UniqueItems:
    return UniqueItems(schema, lambda reference: resolved(schema, reference))
