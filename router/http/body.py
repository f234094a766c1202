"""Read and parse a request's JSON body under bounds. Raises HttpError or InvalidRequestError, never more.

Nothing here knows what the fields mean; `parse_json` refuses what JSON parsers disagree about (duplicate keys,
NaN, lone surrogates), because a proxy in front may have read it differently.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import orjson
from starlette.requests import ClientDisconnect, Request

from common.errors import InvalidRequestError, OverloadedError
from router.http.errors import HttpError

MAX_BODY_BYTES = 16 << 20
MAX_VALUES = 1 << 18  # strings, arrays and objects of a body; parsed, each takes 50 bytes and more
BODY_TIMEOUT_SECONDS = 30.0
UNCOUNTED_BYTES = 64 << 10  # of each body: 128 MB for 2,048 connections
_NO_MARKS = bytes(set(range(256)) - set(b'":[{'))


class HeldBodies:
    """Bound on the bytes of the request bodies of one router, all requests together. Lives in one event loop.

    A body counts from its first byte until its request has its prompt's tokens. The first part of each does not: the
    limit of connections bounds those, and ordinary requests pass while somebody sends large ones.
    """

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self.num_bytes = 0  # held now, of those that count

    @contextmanager
    def hold(self) -> Iterator[HeldBody]:
        """Hold one request's body until the context ends."""
        body = HeldBody(self)
        try:
            yield body
        finally:
            self.num_bytes -= body.num_bytes

    def check(self, more: int) -> None:
        """Raise OverloadedError when there is no room for that many more bytes."""
        if self.num_bytes + more > self._max_bytes:
            raise OverloadedError("the server is reading too many large requests")


class HeldBody:
    """One body, which grows while it arrives."""

    def __init__(self, bodies: HeldBodies) -> None:
        self._bodies = bodies
        self.num_bytes = 0  # that count

    def expect(self, size: int) -> None:
        """Check a declared content length early. Raises OverloadedError when it has no room now."""
        self._bodies.check(_counted(size))

    def grow_to(self, size: int) -> None:
        """Count the bytes received so far. Raises OverloadedError when they have no room."""
        more = _counted(size) - self.num_bytes
        self._bodies.check(more)
        self._bodies.num_bytes += more
        self.num_bytes += more


def _counted(size: int) -> int:
    return max(size - UNCOUNTED_BYTES, 0)


async def read_json_object(request: Request, held: HeldBody) -> dict[str, Any]:
    """The body as a JSON object. Raises OverloadedError, too, when `held` finds no room for it."""
    content_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if content_type != "application/json" and not content_type.endswith("+json"):
        raise HttpError(415, "the Content-Type must be application/json")
    coding = request.headers.get("content-encoding", "").strip().lower()
    if coding not in ("", "identity"):
        raise HttpError(415, f"the Content-Encoding {coding[:32]!r} is not supported: send the body as it is")
    return parse_json_object(await _read(request, held))


async def _read(request: Request, held: HeldBody) -> bytes:
    declared = request.headers.get("content-length", "0")
    if not declared.isascii() or not declared.isdigit() or int(declared[:12]) > MAX_BODY_BYTES:
        raise HttpError(413, f"the body is larger than {MAX_BODY_BYTES >> 20} MB")
    held.expect(int(declared))
    chunks: list[bytes] = []
    size = 0
    try:
        async with asyncio.timeout(BODY_TIMEOUT_SECONDS):
            async for chunk in request.stream():
                size += len(chunk)
                if size > MAX_BODY_BYTES:
                    raise HttpError(413, f"the body is larger than {MAX_BODY_BYTES >> 20} MB")
                held.grow_to(size)
                chunks.append(chunk)
    except TimeoutError:
        raise HttpError(408, "the body did not arrive in time") from None
    except ClientDisconnect:
        raise HttpError(400, "the connection was closed before the body was complete") from None
    return b"".join(chunks)


def parse_json_object(body: bytes) -> dict[str, Any]:
    shape = shape_of(body, MAX_VALUES)
    if shape is None or shape.num_strings + shape.num_containers > MAX_VALUES:
        raise InvalidRequestError(
            f"the body has more than {MAX_VALUES} strings, arrays and objects", code="invalid_json"
        )
    try:
        value = orjson.loads(body)
    except orjson.JSONDecodeError as error:
        what = "empty" if not body else "not valid JSON"
        place = f" (at byte {error.pos})" if body else ""
        raise InvalidRequestError(f"the body is {what}{place}", code="invalid_json") from None
    if not isinstance(value, dict):
        raise InvalidRequestError("the body must be a JSON object", code="invalid_json")
    # The text has all keys; the parsed objects hold each key once.
    if shape.num_keys != _num_keys(value, shape.num_containers):
        raise InvalidRequestError("the body has an object with duplicate keys", code="invalid_json")
    return value


def _num_keys(value: dict[str, Any], num_containers: int) -> int:
    """Keys of all objects in `value`, which has so many containers. Its nesting is bounded by the parser."""
    count = 0
    waiting: list[Any] = [value]
    num_unseen = num_containers - 1  # with none left, long arrays need not be searched
    while waiting:
        item = waiting.pop()
        is_object = isinstance(item, dict)
        count += len(item) if is_object else 0
        if num_unseen:
            children = item.values() if is_object else item
            inner = [child for child in children if type(child) in (dict, list)]
            num_unseen -= len(inner)
            waiting += inner
    return count


class Shape(NamedTuple):
    """Strings include keys. Containers are arrays and objects. Each colon outside of strings belongs to one key."""

    num_strings: int
    num_containers: int
    num_keys: int


def shape_of(text: bytes, max_strings: int) -> Shape | None:
    """Count strings and containers of a JSON text without parsing it; None when it has more than `max_strings`.

    A few copies of the text at most, and no object per value: 16 MB take 20 to 60 ms. Says nothing about whether it
    is JSON.
    """
    if b"\\" in text:  # pairs first: what is left before a quote escapes it
        text = text.replace(b"\\\\", b"").replace(b'\\"', b"")
    marks = text.translate(None, _NO_MARKS)
    num_strings = marks.count(b'"') // 2
    if num_strings > max_strings:
        return None
    outside = b"".join(marks.split(b'"')[::2])
    return Shape(num_strings, outside.count(b"[") + outside.count(b"{"), outside.count(b":"))
