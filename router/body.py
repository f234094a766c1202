"""Read and parse a request's JSON body under bounds. Raises HttpError or InvalidRequestError, never more.

Nothing here knows what the fields mean; `parse_json` refuses what JSON parsers disagree about (duplicate keys,
NaN, lone surrogates), because a proxy in front may have read it differently.
"""

from __future__ import annotations

import asyncio
import re
from typing import Any

import orjson
from starlette.requests import ClientDisconnect, Request

from common.errors import InvalidRequestError
from router.errors import HttpError

MAX_BODY_BYTES = 16 << 20
BODY_TIMEOUT_SECONDS = 30.0
_JSON_STRING = re.compile(rb'"[^"\\]*(?:\\.[^"\\]*)*"', re.DOTALL)


async def read_json_object(request: Request) -> dict[str, Any]:
    """The body as a JSON object."""
    content_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if content_type != "application/json" and not content_type.endswith("+json"):
        raise HttpError(415, "the Content-Type must be application/json")
    return parse_json_object(await _read(request))


async def _read(request: Request) -> bytes:
    declared = request.headers.get("content-length", "0")
    if not declared.isascii() or not declared.isdigit() or int(declared[:12]) > MAX_BODY_BYTES:
        raise HttpError(413, f"the body is larger than {MAX_BODY_BYTES >> 20} MB")
    chunks: list[bytes] = []
    size = 0
    try:
        async with asyncio.timeout(BODY_TIMEOUT_SECONDS):
            async for chunk in request.stream():
                size += len(chunk)
                if size > MAX_BODY_BYTES:
                    raise HttpError(413, f"the body is larger than {MAX_BODY_BYTES >> 20} MB")
                chunks.append(chunk)
    except TimeoutError:
        raise HttpError(408, "the body did not arrive in time") from None
    except ClientDisconnect:
        raise HttpError(400, "the connection was closed before the body was complete") from None
    return b"".join(chunks)


def parse_json_object(body: bytes) -> dict[str, Any]:
    try:
        value = orjson.loads(body)
    except orjson.JSONDecodeError as error:
        what = "empty" if not body else "not valid JSON"
        place = f" (at byte {error.pos})" if body else ""
        raise InvalidRequestError(f"the body is {what}{place}", code="invalid_json") from None
    if not isinstance(value, dict):
        raise InvalidRequestError("the body must be a JSON object", code="invalid_json")
    # Outside strings, each colon belongs to one key; the parsed objects hold each key once.
    if _JSON_STRING.sub(b"", body).count(b":") != _num_keys(value):
        raise InvalidRequestError("the body has an object with duplicate keys", code="invalid_json")
    return value


def _num_keys(value: Any) -> int:
    """Keys of all objects in `value`. Its nesting is bounded by the parser."""
    count = 0
    waiting = [value]
    while waiting:
        item = waiting.pop()
        if isinstance(item, dict):
            count += len(item)
            waiting += [child for child in item.values() if type(child) in (dict, list)]
        else:
            waiting += [child for child in item if type(child) in (dict, list)]
    return count
