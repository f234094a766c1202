"""Renders answers as JSON: the base class of all APIs' renderers, and the one of `/v1/chat/completions`.

The chunk of almost every token is a prefix rendered once plus the JSON of its text; all else is built as a
dictionary. Knows nothing of HTTP, workers or detokenization.
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
    """Fields of a chat's answer besides its text: none here. `router/answer_details` adds some."""

    are_of_tokens = False  # whether chunks of text have some

    def prompt(self) -> dict[str, Any]:
        """Return fields of an answer, or of the chunk that begins a choice."""
        return {}

    def chunk(self, update: Update | ChoiceResult) -> dict[str, Any]:
        """Return fields of a choice in a chunk."""
        return {}

    def choice(self, result: ChoiceResult) -> dict[str, Any]:
        """Return fields of a choice in an answer that is not streamed."""
        return {}


@dataclass(frozen=True, slots=True)
class RenderOptions:
    """Identity of an answer, and the parts that the client asked for."""

    request_id: str
    model: str
    created: int
    include_usage: bool = False
    continuous_usage: bool = False
    details: Details = field(default_factory=Details)


def event(value: Any) -> bytes:
    return b"data: " + orjson.dumps(value) + b"\n\n"


class PlainChunks:
    """Renders chunks of only text: the JSON around it is made once per choice."""

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
    """Renders answers as the JSON of one API."""

    def __init__(self, options: RenderOptions, tokenizer: Tokenizer, kind: str) -> None:
        """kind: the API's name for an event of a stream."""
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


class ChatRenderer(Renderer):
    """Renders only content; `router/grammar/answer_parts.py` adds other parts of messages."""

    _first_content: str | None = ""  # content of the chunk that begins a choice

    def __init__(self, options: RenderOptions, tokenizer: Tokenizer) -> None:
        super().__init__(options, tokenizer, "chat.completion.chunk")
        is_plain = not (options.details.are_of_tokens or options.continuous_usage)
        plain = PlainChunks(self._head, b'"delta":{"content":', b"}", options.include_usage)
        self._plain = plain if is_plain else None

    def start(self, index: int, usage: Usage) -> bytes:
        delta = {"role": "assistant", "content": self._first_content}
        choice: dict[str, Any] = {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}
        return self._event(choice, usage, **self.options.details.prompt())

    def chunk(self, index: int, update: Update | ChoiceResult, usage: Usage) -> bytes:
        if self._plain is not None and update.finish_reason is None:
            return self._plain.render(index, update.text)
        return self._full_chunk(index, update, self._delta(index, update), usage)

    def _full_chunk(self, index: int, update: Update | ChoiceResult, delta: dict[str, Any], usage: Usage) -> bytes:
        """Render the update, and its end as a separate chunk: clients read nothing but the end from that one."""
        details = self.options.details
        choice: dict[str, Any] = {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}
        choice |= details.chunk(update)
        if update.finish_reason is None:
            return self._event(choice, usage)
        end: dict[str, Any] = {"finish_reason": self._finish_reason(index, update.finish_reason)}
        if update.stop_reason is not None:
            end["stop_reason"] = update.stop_reason
        if not delta:
            return self._event(choice | end, usage)
        last = {"index": index, "delta": {}, "logprobs": None, **end, **details.chunk(Update("", []))}
        return self._event(choice, usage) + self._event(last, usage)

    def _delta(self, index: int, update: Update | ChoiceResult) -> dict[str, Any]:
        return {"content": update.text} if update.text or not update.finish_reason else {}

    def _message(self, result: ChoiceResult) -> dict[str, Any]:
        return {"role": "assistant", "content": result.text, "refusal": None}

    def _finish_reason(self, index: int, reason: str | None) -> str | None:
        """Return the finish reason for clients from that of the update."""
        return reason

    def answer(self, results: Sequence[ChoiceResult], usage: Usage) -> bytes:
        body = {**self._head, "object": "chat.completion", "choices": [self._choice(item) for item in results]}
        body["usage"] = usage.as_dict()
        return orjson.dumps(body | self.options.details.prompt())

    def _choice(self, result: ChoiceResult) -> dict[str, Any]:
        choice: dict[str, Any] = {
            "index": result.index,
            "message": self._message(result),
            "logprobs": None,
            "finish_reason": self._finish_reason(result.index, result.finish_reason),
            "stop_reason": result.stop_reason,
        }
        return choice | self.options.details.choice(result)
