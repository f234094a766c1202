"""A reader of one call as a state machine, whose states each read what is complete of the text."""

from __future__ import annotations

from collections.abc import Callable


class StateReader:
    """Base of readers (`CallReader` of tool_parser.py); keeps the text that has not been read."""

    def __init__(self) -> None:
        self.name = ""
        self.has_ended = False  # with a name: a complete call; without: no call
        self._text = ""
        self._at = 0  # where to continue in it
        self._read: Callable[[], bool]  # the state: reads what is complete, and returns whether to continue

    def read(self, text: str, start: int) -> int:
        """See CallReader."""
        self._text = self._text[self._at :] + text[start:]
        self._at = 0
        while not self.has_ended and self._read():
            pass
        if not self.has_ended:
            return len(text)
        return len(text) - (len(self._text) - self._at)
