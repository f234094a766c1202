"""Parses a server's event stream for clients: text, times of its pieces, usage. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import orjson


@dataclass(eq=False)
class StreamError(Exception):
    """The event stream contains no answer. kind: one of a few; event: the server's error event, if it sent one."""

    kind: str
    event: Any = None


@dataclass(slots=True)
class RequestRecord:
    """One request from the client's view. Times are seconds on one clock, from the start of the run."""

    scheduled: float = 0.0  # when the workload wanted it sent
    sent: float = 0.0
    chunk_times: list[float] = field(default_factory=list)
    reasoning: str = ""  # what the model wrote before its answer
    end: float = 0.0
    num_prompt_tokens: int = 0
    num_output_tokens: int = 0
    num_cached_tokens: int = 0
    error: str = ""  # "": finished well; otherwise one of a few kinds, never the server's text
    message: str = ""  # the server's text about the error, if any

    @property
    def ttft(self) -> float:
        return self.chunk_times[0] - self.sent

    @property
    def e2e(self) -> float:
        return self.end - self.sent

    @property
    def tpot(self) -> float | None:
        """Mean time per output token after the first; None for fewer than two tokens."""
        if self.num_output_tokens < 2:
            return None
        return (self.chunk_times[-1] - self.chunk_times[0]) / (self.num_output_tokens - 1)

    @property
    def gaps(self) -> list[float]:
        return [after - before for before, after in zip(self.chunk_times, self.chunk_times[1:], strict=False)]


def message_of(body: Any) -> str:
    """Return the text of an error in OpenAI's shape; empty if it is not one."""
    error = body.get("error") if isinstance(body, dict) else None
    return str(error.get("message") or "") if isinstance(error, dict) else ""


class EventStream:
    """Reads an OpenAI-compatible server's event stream into a record, from pieces cut anywhere."""

    def __init__(self, record: RequestRecord) -> None:
        self.is_complete = False  # the last event has arrived
        self._record = record
        self._pending = b""

    def read(self, data: bytes, now: float) -> str:
        """Read a piece that came at `now`; return the text that it completes. Raises StreamError."""
        *lines, self._pending = (self._pending + data).split(b"\n")
        return "".join([self._read_event(line[5:].strip(), now) for line in lines if line.startswith(b"data:")])

    def _read_event(self, payload: bytes, now: float) -> str:
        if payload == b"[DONE]":
            self.is_complete = True
            return ""
        try:
            event = orjson.loads(payload)
        except orjson.JSONDecodeError:
            event = None
        if not isinstance(event, dict):
            raise StreamError("not JSON")
        if "error" in event:
            raise StreamError("error event", event)
        text, record = "", self._record
        for choice in event.get("choices") or ():
            delta = choice.get("delta") or {}
            piece = choice.get("text") or delta.get("content") or ""
            reasoning = delta.get("reasoning") or delta.get("reasoning_content") or ""
            if piece or reasoning:
                text += piece
                record.reasoning += reasoning
                record.chunk_times.append(now)
        if usage := event.get("usage"):
            record.num_prompt_tokens = usage.get("prompt_tokens", 0)
            record.num_output_tokens = usage.get("completion_tokens", 0)
            record.num_cached_tokens = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
        return text
