"""The JSON of answers: chat completions and completions, as chunks and as a whole.

The chunk that almost every token takes is a prefix rendered once plus the JSON of its text; everything else is built
as a dictionary. Knows nothing of HTTP, workers or how text came about.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import orjson

from common.text.tokenizer import Tokenizer
from protos import types_pb2 as pb
from router.api.choice import Update

MIN_LOGPROB = -9999.0  # JSON has no -inf


@dataclass(slots=True)
class Usage:
    """Token counts of a request so far."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0

    def as_dict(self) -> dict[str, Any]:
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": self.prompt_tokens + self.completion_tokens,
            "prompt_tokens_details": {"cached_tokens": self.cached_tokens},
        }


@dataclass(slots=True)
class ChoiceResult:
    """One finished choice of an answer that is not streamed."""

    index: int
    prompt_index: int = 0
    pieces: list[str] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[pb.TokenLogprobs] = field(default_factory=list)
    prompt_logprobs: list[pb.TokenLogprobs] = field(default_factory=list)
    finish_reason: str | None = None
    stop_reason: str | int | None = None

    def add(self, update: Update) -> None:
        self.pieces.append(update.text)
        self.token_ids += update.token_ids
        self.logprobs += update.logprobs
        self.prompt_logprobs += update.prompt_logprobs
        self.finish_reason, self.stop_reason = update.finish_reason, update.stop_reason

    @property
    def text(self) -> str:
        return "".join(self.pieces)

    @property
    def mean_logprob(self) -> float:
        """Of the choices that best_of compares; one without tokens is the worst."""
        return sum(item.logprob for item in self.logprobs) / len(self.logprobs) if self.logprobs else -math.inf


@dataclass(frozen=True, slots=True)
class RenderOptions:
    """What of an answer the client asked for."""

    request_id: str
    model: str
    created: int
    logprobs: bool = False
    return_token_ids: bool = False
    include_usage: bool = False
    continuous_usage: bool = False
    echo: bool = False
    prompt_texts: tuple[str, ...] = ()  # for echo
    prompt_token_ids: tuple[list[int], ...] = ()  # for echo and return_token_ids


class Renderer(Protocol):
    """One API's shape of the answer."""

    plain: PlainChunks | None  # for chunks in the middle of a choice, when they tell nothing but text

    def start(self, index: int, usage: Usage) -> bytes:
        """What comes before the first text of a choice."""

    def chunk(self, index: int, update: Update, usage: Usage) -> bytes:
        """One event of a stream; empty when there is nothing to tell."""

    def usage_chunk(self, usage: Usage) -> bytes: ...

    def answer(self, results: Sequence[ChoiceResult], usage: Usage) -> bytes: ...


def event(value: Any) -> bytes:
    return b"data: " + orjson.dumps(value) + b"\n\n"


class PlainChunks:
    """Chunks that tell nothing but text: everything around it is made once per choice."""

    def __init__(self, head: dict[str, Any], before_text: bytes, after_text: bytes, include_usage: bool) -> None:
        self._before_index = b"data: " + orjson.dumps(head)[:-1] + b',"choices":[{"index":'
        self._after_index = b"," + before_text
        usage = b',"usage":null' if include_usage else b""
        self._suffix = after_text + b',"logprobs":null,"finish_reason":null}]' + usage + b"}\n\n"
        self._prefixes: dict[int, bytes] = {}

    def render(self, index: int, text: str) -> bytes:
        """Empty when there is no text to tell."""
        if not text:
            return b""
        prefix = self._prefixes.get(index)
        if prefix is None:
            prefix = self._prefixes[index] = self._before_index + b"%d" % index + self._after_index
        return prefix + orjson.dumps(text) + self._suffix


class ChatRenderer:
    """`chat.completion` and `chat.completion.chunk`."""

    def __init__(self, options: RenderOptions, tokenizer: Tokenizer) -> None:
        self._options = options
        self._tokenizer = tokenizer
        self._head = {
            "id": options.request_id,
            "object": "chat.completion.chunk",
            "created": options.created,
            "model": options.model,
        }
        is_plain = not (options.logprobs or options.return_token_ids or options.continuous_usage)
        plain = PlainChunks(self._head, b'"delta":{"content":', b"}", options.include_usage)
        self.plain = plain if is_plain else None

    def start(self, index: int, usage: Usage) -> bytes:
        choice: dict[str, Any] = {
            "index": index, "delta": {"role": "assistant", "content": ""}, "logprobs": None, "finish_reason": None,
        }  # fmt: skip
        extra = {"prompt_token_ids": self._options.prompt_token_ids[0]} if self._options.return_token_ids else {}
        return self._event(choice, usage, extra)

    def chunk(self, index: int, update: Update, usage: Usage) -> bytes:
        if self.plain is not None and update.finish_reason is None:
            return self.plain.render(index, update.text)
        choice: dict[str, Any] = {
            "index": index,
            "delta": {"content": update.text} if update.text or update.finish_reason is None else {},
            "logprobs": self._logprobs(update.logprobs) if self._options.logprobs and update.logprobs else None,
            "finish_reason": update.finish_reason,
        }
        if update.stop_reason is not None:
            choice["stop_reason"] = update.stop_reason
        if self._options.return_token_ids:
            choice["token_ids"] = update.token_ids
        return self._event(choice, usage, {})

    def usage_chunk(self, usage: Usage) -> bytes:
        return event({**self._head, "choices": [], "usage": usage.as_dict()})

    def answer(self, results: Sequence[ChoiceResult], usage: Usage) -> bytes:
        options = self._options
        body = {**self._head, "object": "chat.completion", "choices": [self._choice(item) for item in results]}
        body["usage"] = usage.as_dict()
        if options.return_token_ids:
            body["prompt_token_ids"] = options.prompt_token_ids[0]
        return orjson.dumps(body)

    def _choice(self, result: ChoiceResult) -> dict[str, Any]:
        choice: dict[str, Any] = {
            "index": result.index,
            "message": {"role": "assistant", "content": result.text, "refusal": None},
            "logprobs": self._logprobs(result.logprobs) if self._options.logprobs else None,
            "finish_reason": result.finish_reason,
            "stop_reason": result.stop_reason,
        }
        if self._options.return_token_ids:
            choice["token_ids"] = result.token_ids
        return choice

    def _event(self, choice: dict[str, Any], usage: Usage, extra: dict[str, Any]) -> bytes:
        value = {**self._head, "choices": [choice], **extra}
        if self._options.continuous_usage:
            value["usage"] = usage.as_dict()
        elif self._options.include_usage:
            value["usage"] = None
        return event(value)

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
        return {"token": data.decode("utf-8", "replace"), "logprob": _finite(logprob), "bytes": list(data)}


class CompletionRenderer:
    """`text_completion`, for chunks and whole answers alike."""

    def __init__(self, options: RenderOptions, tokenizer: Tokenizer, choices_per_prompt: int) -> None:
        self._options = options
        self._tokenizer = tokenizer
        self._choices_per_prompt = choices_per_prompt
        self._head = {
            "id": options.request_id,
            "object": "text_completion",
            "created": options.created,
            "model": options.model,
        }
        is_plain = not (options.logprobs or options.return_token_ids or options.continuous_usage or options.echo)
        self.plain = PlainChunks(self._head, b'"text":', b"", options.include_usage) if is_plain else None
        self._offsets: dict[int, int] = {}  # characters shown so far, for text_offset

    def start(self, index: int, usage: Usage) -> bytes:
        return b""

    def chunk(self, index: int, update: Update, usage: Usage) -> bytes:
        if self.plain is not None and update.finish_reason is None:
            return self.plain.render(index, update.text)
        is_first = index not in self._offsets
        offset = self._offsets.setdefault(index, 0)
        text = update.text
        prompt_index = index // self._choices_per_prompt
        if is_first and self._options.echo:
            text = self._options.prompt_texts[prompt_index] + text
        choice = self._choice(index, text, update, offset, prompt_index if is_first else None)
        if is_first and self._options.return_token_ids:
            choice["prompt_token_ids"] = self._options.prompt_token_ids[prompt_index]
        self._offsets[index] = offset + len(text)
        value = {**self._head, "choices": [choice]}
        if self._options.continuous_usage:
            value["usage"] = usage.as_dict()
        elif self._options.include_usage:
            value["usage"] = None
        return event(value)

    def usage_chunk(self, usage: Usage) -> bytes:
        return event({**self._head, "choices": [], "usage": usage.as_dict()})

    def answer(self, results: Sequence[ChoiceResult], usage: Usage) -> bytes:
        choices = []
        for result in results:
            text = (
                self._options.prompt_texts[result.prompt_index] + result.text if self._options.echo else result.text
            )
            update = Update(
                text,
                result.token_ids,
                result.logprobs,
                result.prompt_logprobs,
                result.finish_reason,
                result.stop_reason,
            )
            choice = self._choice(result.index, text, update, 0, result.prompt_index)
            choice["stop_reason"] = result.stop_reason
            if self._options.return_token_ids:
                choice["prompt_token_ids"] = self._options.prompt_token_ids[result.prompt_index]
            choices.append(choice)
        return orjson.dumps({**self._head, "choices": choices, "usage": usage.as_dict()})

    def _choice(self, index: int, text: str, update: Update, offset: int, prompt_index: int | None) -> dict[str, Any]:
        """`prompt_index` is given where the choice's text begins, which is where echo shows the prompt."""
        choice: dict[str, Any] = {
            "index": index, "text": text, "logprobs": None, "finish_reason": update.finish_reason,
        }  # fmt: skip
        if self._options.logprobs:
            shows_prompt = self._options.echo and prompt_index is not None
            before = self._prompt_items(prompt_index or 0, update.prompt_logprobs) if shows_prompt else []
            choice["logprobs"] = self._logprobs([*before, *update.logprobs], offset)
            if shows_prompt:  # nothing comes before the first token that could have predicted it
                choice["logprobs"]["token_logprobs"][0] = None
                choice["logprobs"]["top_logprobs"][0] = None
        if update.stop_reason is not None:
            choice["stop_reason"] = update.stop_reason
        if self._options.return_token_ids:
            choice["token_ids"] = update.token_ids
        return choice

    def _prompt_items(self, prompt_index: int, items: Sequence[pb.TokenLogprobs]) -> list[pb.TokenLogprobs]:
        """One entry per prompt token; a worker may leave out the first one, which has no logprob."""
        token_ids = self._options.prompt_token_ids[prompt_index]
        known = items[len(items) - (len(token_ids) - 1) :] if items else []
        return [pb.TokenLogprobs(token_id=token_ids[0]), *known]

    def _logprobs(self, items: Sequence[pb.TokenLogprobs], offset: int) -> dict[str, Any]:
        tokens: list[str] = []
        offsets: list[int] = []
        tops: list[dict[str, float] | None] = []
        for item in items:
            token = self._text(item.token_id)
            tokens.append(token)
            offsets.append(offset)
            offset += len(token)
            top = {
                self._text(token_id): _finite(logprob)
                for token_id, logprob in zip(item.top_token_ids, item.top_logprobs, strict=True)
            }
            top.setdefault(token, _finite(item.logprob))
            tops.append(top)
        return {
            "tokens": tokens,
            "token_logprobs": [_finite(item.logprob) for item in items],
            "top_logprobs": tops,
            "text_offset": offsets,
        }

    def _text(self, token_id: int) -> str:
        return self._tokenizer.token_bytes(token_id).decode("utf-8", "replace")


def _finite(logprob: float) -> float:
    return logprob if logprob > MIN_LOGPROB else MIN_LOGPROB
