"""The few calls that `chat` and `demo` make to an OpenAI-compatible server: list models, stream an answer."""

from __future__ import annotations

import json
import time
from collections.abc import Generator, Iterator
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import httpx

from common.errors import InvalidRequestError, MiniInferError, UnavailableError

Message = dict[str, str]


class ApiError(MiniInferError):
    """The server refused or broke off; the text is the server's."""


@dataclass(slots=True)
class AnswerStats:
    """Filled while an answer streams; seconds count from sending the request."""

    first_token_seconds: float = 0.0
    total_seconds: float = 0.0
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    num_output_tokens: int = 0
    finish_reason: str = ""

    @property
    def tokens_per_second(self) -> float:
        """Of the tokens after the first one; 0 when there is none."""
        seconds = self.total_seconds - self.first_token_seconds
        return (self.num_output_tokens - 1) / seconds if self.num_output_tokens > 1 and seconds > 0 else 0.0

    def line(self) -> str:
        """For a person, below an answer."""
        rate = f", {self.tokens_per_second:.1f} tokens/s" if self.tokens_per_second else ""
        return f"first token {self.first_token_seconds * 1e3:.0f} ms{rate}, {self.num_output_tokens} tokens"


class ApiClient:
    """Context manager around one HTTP client. All errors are MiniInferErrors."""

    def __init__(self, url: str, api_key: str = "", timeout_seconds: float = 600.0) -> None:
        headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        self.url = url.rstrip("/")
        self._http = httpx.Client(
            base_url=self.url, headers=headers, timeout=httpx.Timeout(timeout_seconds, connect=5.0)
        )

    def __enter__(self) -> ApiClient:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._http.close()

    def choose_model(self, wanted: str = "") -> str:
        """The model that is wanted, or the first one. Raises InvalidRequestError for one that is not served."""
        try:
            reply = self._http.get("/v1/models")
        except httpx.HTTPError as error:
            raise UnavailableError(f"no server answers at {self.url} ({error})") from error
        _raise_for_status(reply)
        names = [str(model["id"]) for model in reply.json().get("data") or []]
        if not names:
            raise ApiError(f"{self.url} lists no model")
        if wanted and wanted not in names:
            raise InvalidRequestError(
                f"the server at {self.url} serves {', '.join(names)}, not {wanted}: leave out --model, or stop it"
            )
        return wanted or names[0]

    def stream_chat(
        self, model: str, messages: list[Message], stats: AnswerStats, **params: Any
    ) -> Generator[str, None, None]:
        """Pieces of the answer as they come; closing the iterator cancels the request. Fills `stats`."""
        body = {
            "model": model,
            "messages": messages,
            "stream": True,
            "stream_options": {"include_usage": True},
        } | params
        begin = time.monotonic()
        try:
            with self._http.stream("POST", "/v1/chat/completions", json=body) as reply:
                if reply.status_code != 200:
                    reply.read()
                    _raise_for_status(reply)
                for event in _events(reply.iter_lines()):
                    text = _read_event(event, stats)
                    if text:
                        stats.total_seconds = time.monotonic() - begin
                        stats.first_token_seconds = stats.first_token_seconds or stats.total_seconds
                        yield text
        except httpx.HTTPError as error:
            raise UnavailableError(f"the connection to {self.url} broke: {error}") from error


def _events(lines: Iterator[str]) -> Iterator[dict[str, Any]]:
    for line in lines:
        if not line.startswith("data:"):
            continue
        data = line[5:].strip()
        if data == "[DONE]":
            return
        event = json.loads(data)
        if "error" in event:
            raise ApiError(_message(event))
        yield event


def _read_event(event: dict[str, Any], stats: AnswerStats) -> str:
    if usage := event.get("usage"):
        stats.num_prompt_tokens = usage.get("prompt_tokens", 0)
        stats.num_output_tokens = usage.get("completion_tokens", 0)
        stats.num_cached_tokens = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
    for choice in event.get("choices") or ():
        stats.finish_reason = choice.get("finish_reason") or stats.finish_reason
        return (choice.get("delta") or {}).get("content") or ""
    return ""


def _raise_for_status(reply: httpx.Response) -> None:
    if reply.status_code == 200:
        return
    try:
        text = _message(reply.json())
    except ValueError:
        text = reply.reason_phrase
    raise ApiError(f"{text} (HTTP {reply.status_code})")


def _message(body: Any) -> str:
    error = body.get("error") if isinstance(body, dict) else None
    return str(error.get("message")) if isinstance(error, dict) else "the server gave no reason"
