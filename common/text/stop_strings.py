"""Finds stop strings in text that arrives in pieces. Knows nothing of tokens or of the API."""

from __future__ import annotations

from collections.abc import Sequence


class StopStringMatcher:
    """Passes text through until a stop string is complete, and holds back what may become one.

    The first complete match ends the text, or the longest of those that are complete at the same character. So the
    result does not depend on how the text is cut into pieces.
    """

    def __init__(self, stops: Sequence[str], include_in_output: bool = False) -> None:
        assert all(stops), "an empty stop string matches everywhere; refuse it before"
        self._stops = tuple(stops)
        self._include = include_in_output
        self._held = ""
        self.match: str | None = None  # the stop string that ended the text

    def push(self, text: str) -> str:
        """Take more text; return what may be shown now. After a match everything else is dropped."""
        if self.match is not None:
            return ""
        text = self._held + text
        found = self._earliest(text)
        if found is not None:
            start, end = found
            self.match = text[start:end]
            self._held = ""
            return text[: end if self._include else start]
        keep = num_begun(text, self._stops)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]

    def skip(self, text: str) -> str:
        """Take text in which stop strings do not count (the first `min_tokens` tokens)."""
        text, self._held = self._held + text, ""
        return text

    def flush(self) -> str:
        """Return what was held back, when the text has ended without a match."""
        text, self._held = self._held, ""
        return text

    def _earliest(self, text: str) -> tuple[int, int] | None:
        """Return begin and end of the match that counts."""
        found = [(start + len(stop), start) for stop in self._stops if (start := text.find(stop)) >= 0]
        if not found:
            return None
        end, start = min(found)
        return start, end


def num_begun(text: str, stops: Sequence[str]) -> int:
    """Return the length of the longest end of `text` that is a proper beginning of one of `stops`."""
    longest = 0
    for stop in stops:
        for length in range(min(len(stop) - 1, len(text)), longest, -1):
            if text.endswith(stop[:length]):
                longest = length
                break
    return longest
