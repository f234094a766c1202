"""The JSON of `/v1/chat/completions`: `chat.completion` and `chat.completion.chunk`, with the parts of messages."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import orjson

from common.text.tokenizer import Tokenizer
from protos import types_pb2 as pb
from router.api.render import PlainChunks, Renderer, RenderOptions, finite
from router.api.results import ChoiceResult, Usage
from router.api.text import TextStage, Update


class AnswerPart(Protocol):
    """What a feature takes out of answers' texts, and where it puts that in the JSON of a chat message.

    Tool calls are such a part (`router/tools/tool_part.py`). Each request that asks for a part has one of its own.
    """

    @property
    def shown(self) -> frozenset[int]:
        """Special tokens whose texts the stage reads, and content never shows."""

    def grammar(self, answer: str, prompt_token_ids: list[int]) -> str:
        """Return the grammar of texts with this part in them whose content follows `answer`; empty: any text."""

    def stage(self, prompt_token_ids: list[int]) -> TextStage:
        """Return what takes this part out of the text of one choice."""

    def delta(self, index: int, update: Update | ChoiceResult) -> dict[str, Any]:
        """Return this part's fields in a chunk of choice `index`; empty when there is nothing new."""

    def message(self, result: ChoiceResult) -> dict[str, Any]:
        """Return this part's fields in the message of an answer in one piece."""

    def finish_reason(self, index: int, reason: str | None) -> str | None:
        """Return the reason to tell clients for an end of choice `index` that workers call `reason`."""


class ChatRenderer(Renderer):
    def __init__(self, options: RenderOptions, tokenizer: Tokenizer, parts: Sequence[AnswerPart] = ()) -> None:
        super().__init__(options, tokenizer, "chat.completion.chunk")
        self._parts = parts
        is_plain = not (options.logprobs or options.return_token_ids or options.continuous_usage)
        plain = PlainChunks(self._head, b'"delta":{"content":', b"}", options.include_usage)
        self._plain = plain if is_plain else None

    def start(self, index: int, usage: Usage) -> bytes:
        delta = {"role": "assistant", "content": None if self._parts else ""}  # there may be other parts alone
        choice: dict[str, Any] = {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}
        return self._event(choice, usage, **self._prompt())

    def chunk(self, index: int, update: Update | ChoiceResult, usage: Usage) -> bytes:
        plain = self._plain if update.finish_reason is None else None
        if plain is not None and not (update.tool_calls or update.reasoning):
            return plain.render(index, update.text)
        delta = self._delta(index, update)
        if plain is not None and not delta:  # a part that the client does not want
            return b""
        return self._full_chunk(index, update, delta, usage)

    def _full_chunk(self, index: int, update: Update | ChoiceResult, delta: dict[str, Any], usage: Usage) -> bytes:
        """Render what has come, and the end as a chunk of its own: clients take nothing else from that."""
        choice: dict[str, Any] = {
            "index": index,
            "delta": delta,
            "logprobs": self._logprobs(update.logprobs) if self.options.logprobs and update.logprobs else None,
            "finish_reason": None,
        }
        if self.options.return_token_ids:
            choice["token_ids"] = update.token_ids
        if update.finish_reason is None:
            return self._event(choice, usage)
        end: dict[str, Any] = {"finish_reason": self._finish_reason(index, update.finish_reason)}
        if update.stop_reason is not None:
            end["stop_reason"] = update.stop_reason
        if not delta:
            return self._event(choice | end, usage)
        last = {"index": index, "delta": {}, "logprobs": None, **end}
        if self.options.return_token_ids:
            last["token_ids"] = []
        return self._event(choice, usage) + self._event(last, usage)

    def _delta(self, index: int, update: Update | ChoiceResult) -> dict[str, Any]:
        is_shown = update.text or not (self._parts or update.finish_reason)
        delta: dict[str, Any] = {"content": update.text} if is_shown else {}
        for part in self._parts:
            delta |= part.delta(index, update)
        return delta

    def _finish_reason(self, index: int, reason: str | None) -> str | None:
        for part in self._parts:
            reason = part.finish_reason(index, reason)
        return reason

    def answer(self, results: Sequence[ChoiceResult], usage: Usage) -> bytes:
        body = {**self._head, "object": "chat.completion", "choices": [self._choice(item) for item in results]}
        body["usage"] = usage.as_dict()
        return orjson.dumps(body | self._prompt())

    def _prompt(self) -> dict[str, Any]:
        """What the client wants to see of the prompt."""
        options = self.options
        shown: dict[str, Any] = {"prompt_token_ids": options.prompt_token_ids[0]} if options.return_token_ids else {}
        return shown | ({"prompt_text": options.prompt_texts[0]} if options.prompt_texts else {})

    def _choice(self, result: ChoiceResult) -> dict[str, Any]:
        message: dict[str, Any] = {"role": "assistant", "content": result.text, "refusal": None}
        for part in self._parts:
            message |= part.message(result)
        choice: dict[str, Any] = {
            "index": result.index,
            "message": message,
            "logprobs": self._logprobs(result.logprobs) if self.options.logprobs else None,
            "finish_reason": self._finish_reason(result.index, result.finish_reason),
            "stop_reason": result.stop_reason,
        }
        if self.options.return_token_ids:
            choice["token_ids"] = result.token_ids
        return choice

    def _logprobs(self, items: Sequence[pb.TokenLogprobs]) -> dict[str, Any]:
        content = []
        for item in items:
            entry = self._token(item.token_id, item.logprob)
            entry["top_logprobs"] = [
                self._token(token_id, logprob)
                for token_id, logprob in zip(item.top_token_ids, item.top_logprobs, strict=True)
            ]
            content.append(entry)
        return {"content": content, "refusal": None}

    def _token(self, token_id: int, logprob: float) -> dict[str, Any]:
        data = self._tokenizer.token_bytes(token_id)
        return {"token": self._text(token_id), "logprob": finite(logprob), "bytes": list(data)}
