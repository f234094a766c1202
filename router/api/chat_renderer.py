"""The JSON of `/v1/chat/completions`: `chat.completion` and `chat.completion.chunk`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import orjson

from common.text.tokenizer import Tokenizer
from router.api.render import PlainChunks, Renderer, RenderOptions
from router.api.text import ChoiceResult, Update, Usage


class ChatRenderer(Renderer):
    """Content alone: `router/grammar/answer_parts.py` adds other parts of messages."""

    _first_content: str | None = ""  # in the chunk that begins a choice

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
        """Render what has come, and the end as a chunk of its own: clients take nothing else from that."""
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
        """What clients are told for an end that workers call `reason`."""
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
