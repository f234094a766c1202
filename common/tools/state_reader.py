"""A reader of one call that goes from state to state, each of which reads what is complete of the text."""

from __future__ import annotations

from collections.abc import Callable


class StateReader:
    """Base of readers (`CallReader` of tool_parser.py): keeps the text from where they stopped on."""

    def __init__(self) -> None:
        self.name = ""
        self.has_ended = False  # with a name: a complete call; without: no call
        self._text = ""
        self._at = 0  # where to read on in it
        self._read: Callable[[], bool]  # the state: reads what is complete; whether to go on

    def read(self, text: str, start: int) -> int:
        """See CallReader."""
        self._text = self._text[self._at :] + text[start:]
        self._at = 0
        while not self.has_ended and self._read():
            pass
        if not self.has_ended:
            return len(text)
        return len(text) - (len(self._text) - self._at)
