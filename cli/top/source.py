"""What a router tells: its events, and one request's explanation. All errors are MiniInferErrors."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Generator, Iterable, Iterator
from typing import Any

import httpx
import orjson

from cli.api_client import ApiError, server_root
from cli.event_stream import message_of
from common.config import SettingsParser
from common.errors import ConfigError, UnavailableError

DEFAULT_URL = "http://127.0.0.1:8000"
SILENCE_SECONDS = 10.0  # events come each second


def add_router_arguments(parser: SettingsParser) -> None:
    parser.add_argument("--url", default=DEFAULT_URL, help=f"the router (default: {DEFAULT_URL})")
    parser.add_argument("--api-key", default="", help="the router's key (default: $MINI_INFER_API_KEY)")


class Router:
    """Context manager around one HTTP client."""

    def __init__(self, url: str, api_key: str) -> None:
        key = api_key or os.environ.get("MINI_INFER_API_KEY", "")
        headers = {"authorization": f"Bearer {key}"} if key else {}
        try:
            self._http = httpx.Client(base_url=server_root(url), headers=headers, timeout=SILENCE_SECONDS)
        except httpx.InvalidURL as error:
            raise ConfigError(f"--url {url!r}: {error}") from error

    def __enter__(self) -> Router:
        return self

    def __exit__(self, *_: object) -> None:
        self._http.close()

    def explanation(self, request_id: str) -> Any:
        """What GET /explain/{id} answers."""
        with self._answer(f"/explain/{request_id}") as reply:
            return orjson.loads(reply.read())

    def events(self) -> Generator[tuple[str, Any], None, None]:
        """(name, value) of each event, until the router ends."""
        with self._answer("/cluster/events") as reply:
            yield from parsed(reply.iter_lines())

    @contextlib.contextmanager
    def _answer(self, path: str) -> Iterator[httpx.Response]:
        try:
            with self._http.stream("GET", path) as reply:
                if reply.status_code != 200:
                    text = reply.read()
                    raise ApiError(_message(text) or f"{path}: {reply.status_code} {reply.reason_phrase}")
                yield reply
        except httpx.HTTPError as error:
            raise UnavailableError(f"no router answers at {self._http.base_url}: {error}") from error


def parsed(lines: Iterable[str]) -> Iterator[tuple[str, Any]]:
    """Events of one data line each."""
    name = ""
    for line in lines:
        if line.startswith("event: "):
            name = line.removeprefix("event: ")
        elif line.startswith("data: "):
            yield name, orjson.loads(line.removeprefix("data: "))


def _message(text: bytes) -> str:
    try:
        return message_of(orjson.loads(text))
    except orjson.JSONDecodeError:
        return ""
