"""The JSON of `/v1/responses`: a response, or its events."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import orjson

from common.text.tokenizer import Tokenizer
from router.api.render import Renderer, RenderOptions
from router.api.text import ChoiceResult, Update, Usage
from router.responses_api.output import DeltaLengths, Event, Output


class ResponsesRenderer(Renderer):
    """Renders one choice, and reports when the response is complete."""

    def __init__(
        self,
        options: RenderOptions,
        tokenizer: Tokenizer,
        facts: dict[str, Any],
        on_complete: Callable[[dict[str, Any], DeltaLengths], None],
        namespaces: Mapping[str, dict[str, str]],
    ) -> None:
        """facts: fields of the request that the response repeats. on_complete: gets a finished response and its delta
        lengths, unless it failed before the client knew its id. namespaces: see `namespaces_of`."""
        super().__init__(options, tokenizer, "response")
        self._facts = {**facts, "model": options.model, "created_at": options.created}
        self._on_complete = on_complete
        self._output = Output(namespaces)
        self._status = "queued"
        self._first_events = first_events(self._response(None, []))
        self._num_events = len(self._first_events)  # `chunk` runs before `start`, whose events have the first numbers
        self._finish_reason: str | None = None

    @property
    def is_over(self) -> bool:
        """Whether no more events come."""
        return self._status not in ("queued", "in_progress")

    def queued(self) -> bytes:
        """Return the events of a background response before it starts."""
        return _joined(self._first_events[:-1])

    def snapshot(self) -> dict[str, Any]:
        """Return the response as it is now."""
        return self._response(None, self._output.items)

    def start(self, index: int, usage: Usage) -> bytes:
        self._status = "in_progress"
        num_sent = len(self._first_events) - 1 if self._facts["background"] else 0
        return _joined(self._first_events[num_sent:], num_sent)

    def chunk(self, index: int, update: Update | ChoiceResult, usage: Usage) -> bytes:
        self._finish_reason = update.finish_reason
        return self._numbered(self._output.add(update))

    def end(self, usage: Usage) -> bytes:
        return self._over("incomplete" if self._finish_reason == "length" else "completed", usage)

    def failure(self, error: dict[str, Any]) -> bytes:
        inner = error["error"]
        return self._over("failed", None, {"code": inner["code"] or inner["type"], "message": inner["message"]})

    def cancelled(self) -> bytes:
        """Return the remaining events after a client cancels the response. OpenAI's API has no event for this."""
        return self._over("cancelled", None)

    def answer(self, results: Sequence[ChoiceResult], usage: Usage) -> bytes:
        [result] = results
        self._finish_reason = result.finish_reason
        self._output.add(result)
        self.end(usage)
        return orjson.dumps(self._response(usage, self._output.items))

    def _over(self, status: str, usage: Usage | None, error: dict[str, Any] | None = None) -> bytes:
        """Complete the response and return its remaining events."""
        begin = b"" if self._status == "in_progress" else self.start(0, Usage())
        self._status = status
        events = self._output.finish(status == "completed")
        response = self._response(usage, self._output.items) | {"error": error}
        self._on_complete(response, self._output.delta_lengths)
        return begin + self._numbered([*events, *last_events(response)])

    def _response(self, usage: Usage | None, output: Sequence[dict[str, Any]]) -> dict[str, Any]:
        reason = {"reason": "max_output_tokens"} if self._status == "incomplete" else None
        return {
            **self._facts, "object": "response", "status": self._status, "error": None, "incomplete_details": reason,
            "output": output, "usage": None if usage is None else _usage(usage),
        }  # fmt: skip

    def _numbered(self, events: Sequence[Event]) -> bytes:
        first = self._num_events
        self._num_events += len(events)
        return _joined(events, first)


def first_events(response: dict[str, Any]) -> list[Event]:
    """Return the events that precede the output. response: with any status, and no output."""
    before = "queued" if response["background"] else "in_progress"
    stages = [("created", before), ("in_progress", "in_progress")]
    if response["background"]:
        stages.insert(1, ("queued", "queued"))
    return [{"type": f"response.{kind}", "response": response | {"status": status}} for kind, status in stages]


def last_events(response: dict[str, Any]) -> list[Event]:
    """Return the events that follow the output of a finished response."""
    if response["status"] == "cancelled":
        return []
    error = [{"type": "error", **response["error"], "param": None}] if response["error"] else []
    return [*error, {"type": f"response.{response['status']}", "response": response}]


def event_bytes(event: Event, number: int) -> bytes:
    """Serialize an event with its sequence number."""
    data = orjson.dumps({**event, "sequence_number": number})
    return f"event: {event['type']}\ndata: ".encode() + data + b"\n\n"


def _joined(events: Sequence[Event], first: int = 0) -> bytes:
    return b"".join(event_bytes(event, number) for number, event in enumerate(events, start=first))


def _usage(usage: Usage) -> dict[str, Any]:
    return {
        "input_tokens": usage.prompt_tokens,
        "input_tokens_details": {"cached_tokens": usage.cached_tokens, "cache_write_tokens": 0},
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": usage.reasoning_tokens},
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
    }
