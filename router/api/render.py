"""Base of the renderers in `chat_renderer` and of other APIs.

The chunk that almost every token takes is a prefix rendered once plus the JSON of its text; everything else is built
as a dictionary. Knows nothing of HTTP, workers or how text came about.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import orjson

from common.text.tokenizer import Tokenizer
from router.api.text import ChoiceResult, Update, Usage

DONE = b"data: [DONE]\n\n"


class Details:
    """What a chat's answer tells beside its text: nothing. `router/answer_details` tells more."""

    are_of_tokens = False  # some belong to chunks of text

    def prompt(self) -> dict[str, Any]:
        """Fields of an answer or of the chunk that begins a choice."""
        return {}

    def chunk(self, update: Update | ChoiceResult) -> dict[str, Any]:
        """Fields of a choice in a chunk."""
        return {}

    def choice(self, result: ChoiceResult) -> dict[str, Any]:
        """Fields of a choice in an answer in one piece."""
        return {}


@dataclass(frozen=True, slots=True)
class RenderOptions:
    """The parts of an answer that the client asked for."""

    request_id: str
    model: str
    created: int
    include_usage: bool = False
    continuous_usage: bool = False
    details: Details = field(default_factory=Details)


def event(value: Any) -> bytes:
    return b"data: " + orjson.dumps(value) + b"\n\n"


class PlainChunks:
    """Chunks of nothing but text: the JSON around it is made once per choice."""

    def __init__(self, head: dict[str, Any], before_text: bytes, after_text: bytes, include_usage: bool) -> None:
        self._before_index = b"data: " + orjson.dumps(head)[:-1] + b',"choices":[{"index":'
        self._after_index = b"," + before_text
        usage = b',"usage":null' if include_usage else b""
        self._suffix = after_text + b',"logprobs":null,"finish_reason":null}]' + usage + b"}\n\n"
        self._prefixes: dict[int, bytes] = {}

    def render(self, index: int, text: str) -> bytes:
        """Render one chunk; empty when there is no text."""
        if not text:
            return b""
        prefix = self._prefixes.get(index)
        if prefix is None:
            prefix = self._prefixes[index] = self._before_index + b"%d" % index + self._after_index
        return prefix + orjson.dumps(text) + self._suffix


class Renderer(ABC):
    """One API's shape of the answer."""

    def __init__(self, options: RenderOptions, tokenizer: Tokenizer, kind: str) -> None:
        """`kind` is what the API calls an event of a stream."""
        self.options = options
        self._tokenizer = tokenizer
        self._head: dict[str, Any] = {
            "id": options.request_id, "object": kind, "created": options.created, "model": options.model,
        }  # fmt: skip

    def start(self, index: int, usage: Usage) -> bytes:
        """Render what precedes the first text of a choice."""
        return b""

    @abstractmethod
    def chunk(self, index: int, update: Update | ChoiceResult, usage: Usage) -> bytes:
        """Render one event of a stream; empty when there is nothing to send."""

    @abstractmethod
    def answer(self, results: Sequence[ChoiceResult], usage: Usage) -> bytes:
        """Render an answer that is not streamed."""

    def end(self, usage: Usage) -> bytes:
        """Render the end of a stream."""
        last = {**self._head, "choices": [], "usage": usage.as_dict()}
        return (event(last) if self.options.include_usage else b"") + DONE

    def failure(self, error: dict[str, Any]) -> bytes:
        """Render the end of a stream that has failed."""
        return event(error) + DONE

    def _event(self, choice: dict[str, Any], usage: Usage, **extra: Any) -> bytes:
        value = {**self._head, "choices": [choice], **extra}
        if self.options.continuous_usage:
            value["usage"] = usage.as_dict()
        elif self.options.include_usage:
            value["usage"] = None
        return event(value)
