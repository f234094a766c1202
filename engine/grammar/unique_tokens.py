"""Removes tokens from masks that repeat an item of an array of unique items, see `common.grammar.unique_places`."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

import numpy as np

from common.grammar.unique_items import State
from common.grammar.unique_places import UniquePlaces
from engine.logit_rules.filters import Words

_SEVERAL = re.compile(rb'\[.*,|,.*[,\]]|".*,.*"|(".*){3}', re.DOTALL)  # may contain more than the end of an item


class TokenTable:
    """The bytes of a model's tokens, and which of them may end an item."""

    def __init__(self, tokens: Sequence[bytes], special: tuple[str, ...] = ()) -> None:
        """special: texts of special tokens, which differ from these tokens' bytes."""
        self.tokens = tokens
        self.special = special
        self.quoting = _words(tokens, lambda token: b'"' in token)
        self.several = _words(tokens, lambda token: _SEVERAL.search(token) is not None)
        self.by_bytes: dict[bytes, list[int]] = {}
        self.by_head: dict[bytes, list[int]] = {}  # by the bytes before the quotation mark that ends a text
        for token_id, token in enumerate(tokens):
            if token:
                self.by_bytes.setdefault(token, []).append(token_id)
                head = re.match(rb'((?:[^"\\]|\\.)*)"', token, re.DOTALL)
                if head:
                    self.by_head.setdefault(head.group(1), []).append(token_id)


class UniqueTokens:
    """Follows one answer, together with its matcher."""

    def __init__(self, places: UniquePlaces, table: TokenTable) -> None:
        self._places = places
        self._table = table
        self._states: list[State | None] = [places.first]  # after each number of tokens

    def follow(self, num_same: int, output_token_ids: Sequence[int]) -> bool:
        """Follow an output of which `num_same` tokens are unchanged. Returns whether its items are unique."""
        del self._states[num_same + 1 :]
        for token_id in output_token_ids[len(self._states) - 1 :]:
            state = self._states[-1]
            self._states.append(None if state is None else self._places.after(state, self._table.tokens[token_id]))
        return self._states[-1] is not None

    def without_repeats(self, words: Words) -> Words:
        """Remove the tokens that repeat an item from the mask."""
        state, table = self._states[-1], self._table
        assert state is not None
        if self._places.is_apart(state):
            return words
        array = state.array
        if array is None:
            wanted = _ids(words & table.several[: len(words)])
        elif not state.is_text or array.texts:
            wanted = _ids(words)
        elif state.is_escaped:
            wanted = _ids(words & table.quoting[: len(words)])
        else:
            wanted = _ids(words & table.several[: len(words)])
            for text in array.seen:
                if isinstance(text, bytes) and text[:1] == b'"' and text.startswith(state.piece):
                    rest = text[len(state.piece) : -1]
                    wanted += [*table.by_head.get(rest, ()), *table.by_bytes.get(rest, ())]
        blocked = [each for each in wanted if self._places.after(state, table.tokens[each]) is None]
        if not blocked:
            return words
        kept = words.copy()
        for token_id in blocked:
            if token_id < 32 * len(kept):
                kept[token_id // 32] &= ~np.uint32(1 << (token_id % 32))
        return kept


def _words(tokens: Sequence[bytes], is_one: Callable[[bytes], bool]) -> Words:
    flags = np.zeros(-(-len(tokens) // 32) * 32, dtype=np.uint8)
    flags[[token_id for token_id, token in enumerate(tokens) if is_one(token)]] = 1
    return np.packbits(flags, bitorder="little").view(np.uint32)


def _ids(words: Words) -> list[int]:
    return [int(each) for each in np.flatnonzero(np.unpackbits(words.view(np.uint8), bitorder="little"))]
