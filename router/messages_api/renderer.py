"""The JSON of `/v1/messages`: a message, or its events."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import orjson
from pydantic import TypeAdapter

from common.text.tokenizer import Tokenizer
from common.tools.call_deltas import DeltaToolCall, merged_calls
from router.api.render import Renderer, RenderOptions
from router.api.text import ChoiceResult, Update, Usage
from router.messages_api.schemas import NO_THREADS, MessagesBody

_ANY = TypeAdapter[Any](Any)
_ERROR_TYPES = {"service_unavailable_error": "overloaded_error", "server_error": "api_error"}
_STOP_REASONS = {"stop": "end_turn", "length": "max_tokens"}


class MessagesRenderer(Renderer):
    """Renders one choice as consecutive content blocks: thinking, text, tool calls."""

    def __init__(self, options: RenderOptions, tokenizer: Tokenizer, body: MessagesBody) -> None:
        super().__init__(options, tokenizer, "message")
        self._max_tokens = body.max_tokens  # an answer that is cut earlier has reached the end of the context
        self._shows_thinking = body.thinking is None or body.thinking.display != "omitted"
        self._num_blocks = 0
        self._open = ""  # kind of the open block
        self._ended: Update | ChoiceResult | None = None
        self._has_calls = False

    def start(self, index: int, usage: Usage) -> bytes:
        return _event("message_start", message=self._message([], _usage(usage) | {"output_tokens": 0}))

    def chunk(self, index: int, update: Update | ChoiceResult, usage: Usage) -> bytes:
        events = []
        if update.reasoning and self._shows_thinking:
            events.append(self._part("thinking", {"thinking": "", "signature": ""}, update.reasoning))
        if update.text:
            events.append(self._part("text", {"text": ""}, update.text))
        events += [self._call(call) for call in merged_calls(update.tool_calls)]
        if update.finish_reason is not None:
            self._ended = update
        return b"".join(events)

    def end(self, usage: Usage) -> bytes:
        delta = self._stop(self._ended, usage)
        return self._close() + _event("message_delta", delta=delta, usage=_usage(usage)) + _event("message_stop")

    def failure(self, error: dict[str, Any]) -> bytes:
        return b"event: error\ndata: " + orjson.dumps(error) + b"\n\n"

    def answer(self, results: Sequence[ChoiceResult], usage: Usage) -> bytes:
        [result] = results
        blocks: list[dict[str, Any]] = []
        if result.reasoning and self._shows_thinking:
            blocks.append({"type": "thinking", "thinking": result.reasoning, "signature": ""})
        if result.text:
            blocks.append({"type": "text", "text": result.text})
        calls = merged_calls(result.tool_calls)
        self._has_calls = bool(calls)
        blocks += [
            {"type": "tool_use", "id": call.call_id, "name": call.name, "input": _input(call)} for call in calls
        ]
        return orjson.dumps(self._message(blocks, _usage(usage)) | self._stop(result, usage))

    # -- blocks ------------------------------------------------------------------------------------------------

    def _part(self, kind: str, empty: dict[str, Any], text: str) -> bytes:
        begin = b""
        if self._open != kind:
            begin = self._begin(kind, {"type": kind, **empty})
        return begin + self._delta({"type": f"{kind}_delta", kind: text})

    def _call(self, call: DeltaToolCall) -> bytes:
        begin = b""
        if call.name:
            self._has_calls = True
            begin = self._begin("tool_use", {"type": "tool_use", "id": call.call_id, "name": call.name, "input": {}})
        if not call.arguments:
            return begin
        return begin + self._delta({"type": "input_json_delta", "partial_json": call.arguments})

    def _begin(self, kind: str, block: dict[str, Any]) -> bytes:
        before = self._close()
        self._open = kind
        self._num_blocks += 1
        return before + _event("content_block_start", index=self._num_blocks - 1, content_block=block)

    def _delta(self, delta: dict[str, Any]) -> bytes:
        return _event("content_block_delta", index=self._num_blocks - 1, delta=delta)

    def _close(self) -> bytes:
        if not self._open:
            return b""
        signed = b""
        if self._open == "thinking":  # some clients leave out thinking that was not signed when they send it back
            signed = self._delta({"type": "signature_delta", "signature": ""})
        self._open = ""
        return signed + _event("content_block_stop", index=self._num_blocks - 1)

    # -- the message -------------------------------------------------------------------------------------------

    def _message(self, blocks: list[dict[str, Any]], usage: dict[str, int]) -> dict[str, Any]:
        return {
            "id": self.options.request_id,
            "type": "message",
            "role": "assistant",
            "model": self.options.model,
            "content": blocks,
            "stop_reason": None,
            "stop_sequence": None,
            "usage": usage,
        }

    def _stop(self, ended: Update | ChoiceResult | None, usage: Usage) -> dict[str, Any]:
        reason, detail = (ended.finish_reason, ended.stop_reason) if ended is not None else (None, None)
        if reason == "stop" and isinstance(detail, str):
            return {"stop_reason": "stop_sequence", "stop_sequence": detail}
        if reason == "stop" and self._has_calls:
            return {"stop_reason": "tool_use", "stop_sequence": None}
        if reason == "length" and usage.completion_tokens < self._max_tokens:
            return {"stop_reason": "model_context_window_exceeded", "stop_sequence": None}
        return {"stop_reason": _STOP_REASONS.get(reason or "", reason), "stop_sequence": None}


def error_shape(error: dict[str, Any]) -> dict[str, Any]:
    """Convert OpenAI's form of an error to Anthropic's, where only the message can name the field."""
    inner = error["error"]
    message, param = inner["message"], inner["param"]
    if inner["code"] == "context_length_exceeded":
        message = f"prompt is too long: {message}"  # Anthropic's words, for which clients search
    if param is not None and param not in message:
        message = f"{param}: {message}"
    kind = "not_found_error" if inner["code"] in ("model_not_found", "not_found") else inner["type"]
    details = {"details": {"error_code": NO_THREADS}} if inner["code"] == NO_THREADS else {}
    return {"type": "error", "error": {"type": _ERROR_TYPES.get(kind, kind), "message": message, **details}}


def _event(kind: str, **fields: Any) -> bytes:
    return f"event: {kind}\ndata: ".encode() + orjson.dumps({"type": kind, **fields}) + b"\n\n"


def _usage(usage: Usage) -> dict[str, int]:
    """Return the token counts; cached tokens are counted separately."""
    return {
        "input_tokens": usage.prompt_tokens - usage.cached_tokens,
        "cache_read_input_tokens": usage.cached_tokens,
        "cache_creation_input_tokens": 0,
        "output_tokens": usage.completion_tokens,
    }


def _input(call: DeltaToolCall) -> dict[str, Any]:
    """Return the arguments of a call as an object; {} if they are none, since a block's input must be one. Of a call
    that was cut short, keep the complete part, as Anthropic's clients do with streamed arguments."""
    try:
        value = orjson.loads(call.arguments)
    except orjson.JSONDecodeError:
        try:
            begun = _ANY.validate_json(call.arguments, experimental_allow_partial=True)
        except ValueError:
            return {}
        value = orjson.loads(_ANY.dump_json(begun))  # turns integers of any length into what orjson can write
    return value if isinstance(value, dict) else {}
