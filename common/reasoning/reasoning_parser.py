"""Separates reasoning and answer in a text as it arrives. Knows nothing of tokens, requests or the API's JSON.

How the text is cut into pieces does not matter: anything that may become a marker is held back.
"""

from __future__ import annotations

from typing import Protocol

from common.reasoning.reasoning_format import CHANNEL, MESSAGE, MESSAGE_ENDS, RECIPIENT, START, ReasoningFormat
from common.text.stop_strings import num_begun


class ReasoningParser(Protocol):
    """Splits one text."""

    def push(self, text: str) -> tuple[str, str]:
        """Take more text; return the new parts of the reasoning and of the answer."""

    def finish(self) -> tuple[str, str]:
        """Return what was held back, when the text has ended."""


def parser_for(written: ReasoningFormat, prompt_end: str, has_tools: bool = False) -> ReasoningParser:
    """Return the parser of a text that continues a prompt, which may have opened or closed the reasoning.

    has_tools: tool calls are read from the answer.
    """
    if written.is_channels:
        return ChannelParser(has_tools)
    end = prompt_end.rstrip()
    if end.endswith(written.end):  # reasoning is turned off
        return AnswerAlone()
    return MarkedParser(written, is_open=is_opened(written, prompt_end))


def is_opened(written: ReasoningFormat, prompt_end: str) -> bool:
    """Whether the prompt has opened the reasoning. Only blanks may follow the marker, as messages may contain it,
    too."""
    return not written.is_channels and prompt_end.rstrip().endswith(written.begin)


class AnswerAlone:
    """A text without reasoning."""

    def push(self, text: str) -> tuple[str, str]:
        return "", text

    def finish(self) -> tuple[str, str]:
        return "", ""


class MarkedParser:
    """Reasoning between two markers at the beginning of the text. Blanks around it are dropped."""

    def __init__(self, written: ReasoningFormat, is_open: bool) -> None:
        """is_open: the text begins inside the reasoning."""
        self._written = written
        self._held = ""
        self._has_reasoned = False  # some reasoning has been shown
        self._read = self._reasoning if is_open else self._before

    def push(self, text: str) -> tuple[str, str]:
        return self._read(self._held + text)

    def finish(self) -> tuple[str, str]:
        held, self._held = self._held, ""
        if self._read == self._reasoning:
            return held.rstrip(), ""
        return "", "" if self._read == self._after else held

    # -- parts of the text: each reads what it can, and holds back what is undecided -------------------------------

    def _before(self, text: str) -> tuple[str, str]:
        begin, rest = self._written.begin, text.lstrip()
        if rest.startswith(begin):
            self._read = self._reasoning
            return self._reasoning(rest[len(begin) :])
        if begin.startswith(rest):
            self._held = text
            return "", ""
        return self._answer(text)

    def _reasoning(self, text: str) -> tuple[str, str]:
        text = text if self._has_reasoned else text.lstrip()
        end = text.find(self._written.end)
        if end >= 0:
            self._read = self._after
            return text[:end].rstrip(), self._after(text[end + len(self._written.end) :])[1]
        shown = text[: len(text) - num_begun(text, (self._written.end,))].rstrip()  # which may precede the end
        self._held = text[len(shown) :]
        self._has_reasoned = self._has_reasoned or bool(shown)
        return shown, ""

    def _after(self, text: str) -> tuple[str, str]:
        text = text.lstrip()
        self._held = ""
        return self._answer(text) if text else ("", "")

    def _answer(self, text: str) -> tuple[str, str]:
        self._held = ""
        self._read = self._answer
        return "", text


class ChannelParser:
    """Messages in gpt-oss's harmony format: `<|channel|>NAME<|message|>TEXT<|end|><|start|>assistant...`.

    The analysis channel is reasoning; all others are the answer. A text that begins without a marker is an answer,
    too.
    """

    def __init__(self, has_tools: bool = False) -> None:
        """has_tools: a message to a function keeps its header, from the recipient on, in the answer."""
        self._has_tools = has_tools
        # After `<|start|>assistant`, which ends the prompt, there may be a recipient.
        self._begins = (CHANNEL, START, MESSAGE, *((f" {RECIPIENT}",) if has_tools else ()))
        self._held = ""
        self._is_header = True
        self._is_reasoning = False
        self._has_begun = False

    def push(self, text: str) -> tuple[str, str]:
        text, self._held = self._held + text, ""
        parts: tuple[list[str], list[str]] = ([], [])
        while text:
            text = self._read_header(text, parts[1]) if self._is_header else self._read_message(text, parts)
        return "".join(parts[0]), "".join(parts[1])

    def finish(self) -> tuple[str, str]:
        held, self._held = self._held, ""
        if self._is_header and self._has_begun:
            return "", ""
        return (held, "") if self._is_reasoning else ("", held)

    def _read_header(self, text: str, answer: list[str]) -> str:
        """Read up to the message; return the rest. A text that begins without markers has no header."""
        if not self._has_begun:
            if not text.startswith(self._begins):
                if num_begun(text, self._begins) == len(text):
                    self._held = text
                    return ""
                self._is_header = False
            self._has_begun = True
            return text
        head, marker, rest = text.partition(MESSAGE)
        if not marker:
            self._held = text
            return ""
        self._is_header = False
        _, recipient, called = head.partition(RECIPIENT)
        self._is_reasoning = not recipient and head.rpartition(CHANNEL)[2].split()[:1] == ["analysis"]
        if recipient and self._has_tools:
            answer.append(recipient + called + MESSAGE)
        return rest

    def _read_message(self, text: str, parts: tuple[list[str], list[str]]) -> str:
        shown = parts[0] if self._is_reasoning else parts[1]
        found = [(place, marker) for marker in MESSAGE_ENDS if (place := text.find(marker)) >= 0]
        if not found:
            end = len(text) - num_begun(text, MESSAGE_ENDS)
            shown.append(text[:end])
            self._held = text[end:]
            return ""
        place, marker = min(found)
        shown.append(text[:place])
        self._is_header, self._is_reasoning = True, False
        # The marker that begins the next message is part of its header.
        return text[place:] if marker in (CHANNEL, START) else text[place + len(marker) :]
