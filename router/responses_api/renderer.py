"""The JSON of `/v1/responses`: a response, or its events."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import orjson

from common.text.tokenizer import Tokenizer
from router.api.render import Renderer, RenderOptions
from router.api.results import ChoiceResult, Usage
from router.api.text import Update
from router.responses_api.output import DeltaLengths, Event, Output


class ResponsesRenderer(Renderer):
    """Renders one choice, and tells when the response is complete."""

    def __init__(
        self,
        options: RenderOptions,
        tokenizer: Tokenizer,
        facts: dict[str, Any],
        on_complete: Callable[[dict[str, Any], DeltaLengths], None],
    ) -> None:
        """facts: of the request, which the response repeats. on_complete: takes the response and its deltas."""
        super().__init__(options, tokenizer, "response")
        self._facts = {**facts, "model": options.model, "created_at": options.created}
        self._on_complete = on_complete
        self._output = Output()
        self._num_events = 0
        self._finish_reason: str | None = None

    def start(self, index: int, usage: Usage) -> bytes:
        # `chunk` comes first, so that its events have taken the first numbers.
        events = first_events(self._response("in_progress", None))
        return b"".join(event_bytes(event, number) for number, event in enumerate(events))

    def chunk(self, index: int, update: Update | ChoiceResult, usage: Usage) -> bytes:
        self._finish_reason = update.finish_reason
        return self._numbered(self._output.add(update))

    def end(self, usage: Usage) -> bytes:
        is_complete = self._finish_reason != "length"
        events = self._output.finish(is_complete)
        response = self._completed(usage)
        return self._numbered([*events, {"type": f"response.{response['status']}", "response": response}])

    def failure(self, error: dict[str, Any]) -> bytes:
        inner = error["error"]
        told = {"code": inner["code"] or inner["type"], "message": inner["message"]}
        response = self._response("failed", None) | {"error": told}
        return self._numbered([
            {"type": "error", **told, "param": inner["param"]}, {"type": "response.failed", "response": response},
        ])  # fmt: skip

    def answer(self, results: Sequence[ChoiceResult], usage: Usage) -> bytes:
        [result] = results
        self._finish_reason = result.finish_reason
        self._output.add(result)
        self._output.finish(self._finish_reason != "length")
        return orjson.dumps(self._completed(usage))

    def _completed(self, usage: Usage) -> dict[str, Any]:
        status = "incomplete" if self._finish_reason == "length" else "completed"
        response = self._response(status, usage)
        self._on_complete(response, self._output.delta_lengths)
        return response

    def _response(self, status: str, usage: Usage | None) -> dict[str, Any]:
        reason = {"reason": "max_output_tokens"} if status == "incomplete" else None
        is_over = status in ("completed", "incomplete")
        output = self._output.items if is_over else []
        return {
            **self._facts, "object": "response", "status": status, "error": None, "incomplete_details": reason,
            "output": output, "usage": None if usage is None else _usage(usage),
        }  # fmt: skip

    def _numbered(self, events: Sequence[Event]) -> bytes:
        first = self._num_events + 2  # after the two of `start`
        self._num_events += len(events)
        return b"".join(event_bytes(event, number) for number, event in enumerate(events, start=first))


def first_events(response: dict[str, Any]) -> list[Event]:
    """The events before the output. response: as it is then."""
    return [{"type": kind, "response": response} for kind in ("response.created", "response.in_progress")]


def event_bytes(event: Event, number: int) -> bytes:
    """The event with its sequence number, as it is sent."""
    data = orjson.dumps({**event, "sequence_number": number})
    return f"event: {event['type']}\ndata: ".encode() + data + b"\n\n"


def _usage(usage: Usage) -> dict[str, Any]:
    return {
        "input_tokens": usage.prompt_tokens,
        "input_tokens_details": {"cached_tokens": usage.cached_tokens},
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": usage.reasoning_tokens},
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
    }
