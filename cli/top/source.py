"""Reads a router's events, and the explanation of a request. All errors are MiniInferErrors."""

from __future__ import annotations

import argparse
from collections.abc import Generator, Iterable, Iterator
from typing import Any

import httpx
import orjson

from cli.client.api_client import API_KEY, DEFAULT_URL, ApiClient, api_key_of, raise_for_status
from common.config import SettingsParser

SILENCE_SECONDS = 10.0  # events come each second


def add_router_arguments(parser: SettingsParser) -> None:
    parser.add_argument("--url", default=DEFAULT_URL, help=f"the router (default: {DEFAULT_URL})")
    parser.add_argument("--api-key", default="", help=f"the router's key (default: ${API_KEY})")


class RouterClient(ApiClient):
    """A client of a router."""

    def events(self) -> Generator[tuple[str, Any], None, None]:
        """Yield (name, value) of each event, until the router ends. Raises ApiError, UnavailableError after a
        silence."""
        try:
            with self._http.stream("GET", "/cluster/events", timeout=SILENCE_SECONDS) as reply:
                if reply.status_code != 200:
                    reply.read()
                raise_for_status(reply)
                yield from parsed(reply.iter_lines())
        except httpx.HTTPError as error:
            raise self._unavailable(error) from error


def router_of(arguments: argparse.Namespace) -> RouterClient:
    """Return a client of the router that the arguments name. Raises ConfigError."""
    return RouterClient(arguments.url, api_key_of(arguments))


def parsed(lines: Iterable[str]) -> Iterator[tuple[str, Any]]:
    """Parse events with one data line each."""
    name = ""
    for line in lines:
        if line.startswith("event: "):
            name = line.removeprefix("event: ")
        elif line.startswith("data: "):
            yield name, orjson.loads(line.removeprefix("data: "))
