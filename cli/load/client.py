"""A small HTTP/1.1 client that reads server-sent events with little work per chunk.

A `Connection` carries one request at a time and is reused. `Client.complete` never raises for errors of server or
network: the record's `error` names the kind. httptools and orjson parse. Times are from time.perf_counter, since
uvloop's clock has a resolution of one millisecond.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import time
from dataclasses import dataclass
from typing import Any, cast
from urllib.parse import urlsplit

import httptools
import orjson

from cli.client.event_stream import EventStream, RequestRecord, StreamError, message_of
from cli.load.workload import PlannedRequest
from common.errors import ConfigError

MAX_REFUSAL_BYTES = 1 << 16


@dataclass(frozen=True)
class Target:
    """The server under load, and how to send requests to it. `url` is its root, without /v1."""

    url: str
    model: str
    api_key: str = ""
    endpoint: str = "completions"  # or "chat"
    exact_output: bool = True  # ignore_eos and min_tokens: not part of OpenAI's API, but most servers have them
    temperature: float = 0.0

    @property
    def path(self) -> str:
        return urlsplit(self.url).path.rstrip("/") + (
            "/v1/completions" if self.endpoint == "completions" else "/v1/chat/completions"
        )

    def body(self, request: PlannedRequest) -> bytes:
        """Return the JSON body of one streamed request."""
        fields: dict[str, Any] = {
            "model": self.model,
            "max_tokens": request.num_output_tokens,
            "temperature": self.temperature,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if self.endpoint == "completions":
            fields["prompt"] = request.prompt
        elif isinstance(request.prompt, str):
            fields["messages"] = [{"role": "user", "content": request.prompt}]
        else:
            raise ConfigError("--vocab-size makes prompts of token ids, which --endpoint chat can't send")
        if self.exact_output:
            fields |= {"ignore_eos": True, "min_tokens": request.num_output_tokens}
        return orjson.dumps(fields)

    def head(self, content_length: int) -> bytes:
        """Return the request line and headers."""
        key = f"Authorization: Bearer {self.api_key}\r\n" if self.api_key else ""
        return (
            f"POST {self.path} HTTP/1.1\r\nHost: {urlsplit(self.url).netloc}\r\nContent-Type: application/json\r\n"
            f"Accept: text/event-stream\r\n{key}Content-Length: {content_length}\r\n\r\n"
        ).encode()


class Connection(asyncio.Protocol):
    """One connection. `ask` fills a record; asyncio and httptools call the methods below."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._transport: asyncio.Transport | None = None
        self._done: asyncio.Future[None] | None = None
        self.is_open = False

    async def ask(self, head: bytes, body: bytes, record: RequestRecord, begin: float) -> None:
        """Send one request and read its answer into `record`; times count from `begin` (time.perf_counter)."""
        assert self._transport is not None
        assert self._done is None
        self._parser = httptools.HttpResponseParser(self)
        self._record = record
        self._begin = begin
        self._events = EventStream(record)
        self._refusal = b""
        self._done = self._loop.create_future()
        record.sent = time.perf_counter() - begin
        self._transport.writelines([head, body])
        try:
            await self._done
        finally:
            self._done = None
            record.end = time.perf_counter() - begin

    def close(self) -> None:
        self.is_open = False
        if self._transport is not None:
            self._transport.abort()

    # --- asyncio.Protocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's transports do not inherit from asyncio's
        self.is_open = True

    def data_received(self, data: bytes) -> None:
        if self._done is None:  # bytes without a request
            self.close()
            return
        self._now = time.perf_counter() - self._begin
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError:
            self._fail("not HTTP")
            self.close()

    def connection_lost(self, exc: Exception | None) -> None:
        self.is_open = False
        self._fail("disconnected")

    # --- httptools

    def on_body(self, data: bytes) -> None:
        if self._parser.get_status_code() != 200:
            self._refusal = (self._refusal + data)[:MAX_REFUSAL_BYTES]
            return
        try:
            self._events.read(data, self._now)
        except StreamError as error:
            self._record.error, self._record.message = error.kind, message_of(error.event)

    def on_message_complete(self) -> None:
        status = self._parser.get_status_code()
        if status != 200:
            self._record.error = f"http {status}"
            with contextlib.suppress(orjson.JSONDecodeError):  # a proxy's page: only the status is reported
                self._record.message = message_of(orjson.loads(self._refusal))
        elif not self._events.is_complete and not self._record.error:
            self._record.error = "incomplete"
        if not self._parser.should_keep_alive():
            self.close()
        if self._done is not None and not self._done.done():
            self._done.set_result(None)

    def _fail(self, kind: str) -> None:
        if self._done is not None and not self._done.done():
            self._record.error = self._record.error or kind
            self._done.set_result(None)


class Client:
    """Keeps connections to one server. `complete` is safe to call from many tasks."""

    def __init__(self, target: Target, timeout_seconds: float = 600.0, stop_after_seconds: float = math.inf) -> None:
        """stop_after_seconds: counted from the run's begin; answers that are incomplete by then time out, too."""
        parts = urlsplit(target.url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ConfigError(f"--url {target.url!r}: give the server's root, such as http://127.0.0.1:8000")
        self._target = target
        self._host = parts.hostname
        self._port = parts.port or (443 if parts.scheme == "https" else 80)
        self._tls = parts.scheme == "https"
        self._timeout = timeout_seconds
        self._stop_after = stop_after_seconds
        self._idle: list[Connection] = []
        self._open: dict[int, RequestRecord] = {}  # by the record's id()

    def open_records(self) -> list[RequestRecord]:
        """Return the records of requests in progress. May be called from another thread."""
        return list(self._open.values())

    async def complete(self, request: PlannedRequest, scheduled: float, begin: float) -> RequestRecord:
        """Send one request and read its answer. Times count from `begin`, a time.perf_counter()."""
        now = time.perf_counter() - begin
        record = RequestRecord(scheduled=scheduled, sent=now, end=now)
        body = self._target.body(request)
        self._open[id(record)] = record
        try:
            async with asyncio.timeout(max(min(self._timeout, self._stop_after - now), 0.0)):
                connection = await self._connect()
                try:
                    await connection.ask(self._target.head(len(body)), body, record, begin)
                except BaseException:  # a timeout, or the end of the program
                    connection.close()  # the next request must not get this one's answer
                    raise
        except TimeoutError:  # before OSError, its base class
            record.error = "timeout"
            return record
        except OSError:
            record.error = "connect"
            return record
        finally:
            del self._open[id(record)]
        if connection.is_open:
            self._idle.append(connection)
        return record

    def close(self) -> None:
        """Close the idle connections."""
        for connection in self._idle:
            connection.close()
        self._idle.clear()

    async def _connect(self) -> Connection:
        while self._idle:
            connection = self._idle.pop()
            if connection.is_open:
                return connection
        loop = asyncio.get_running_loop()
        _, connection = await loop.create_connection(Connection, self._host, self._port, ssl=self._tls or None)
        return connection
