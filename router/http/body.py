"""Read and parse a request's JSON body. Raises HttpError or InvalidRequestError, and what bounds on all bodies raise.

Nothing here knows what the fields mean. What JSON parsers disagree about (NaN, lone surrogates; duplicate keys by
`router/body_bounds`) is refused, because a proxy in front may have read it differently.
"""

from __future__ import annotations

import asyncio
from typing import Any

import orjson
from starlette.requests import ClientDisconnect, Request

from common.errors import InvalidRequestError
from common.wings import has_wing
from router.http.errors import HttpError

HAS_BOUNDS = has_wing("router.body_bounds")
if HAS_BOUNDS:
    from router.body_bounds.json_shape import check_keys, checked_shape

MAX_BODY_BYTES = 16 << 20
BODY_TIMEOUT_SECONDS = 30.0


async def read_json_object(request: Request) -> dict[str, Any]:
    """The body as a JSON object."""
    content_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if content_type != "application/json" and not content_type.endswith("+json"):
        raise HttpError(415, "the Content-Type must be application/json")
    coding = request.headers.get("content-encoding", "").strip().lower()
    if coding not in ("", "identity"):
        raise HttpError(415, f"the Content-Encoding {coding[:32]!r} is not supported: send the body as it is")
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
    shape = checked_shape(body) if HAS_BOUNDS else None
    try:
        value = orjson.loads(body)
    except orjson.JSONDecodeError as error:
        what = "empty" if not body else "not valid JSON"
        place = f" (at byte {error.pos})" if body else ""
        raise InvalidRequestError(f"the body is {what}{place}", code="invalid_json") from None
    if not isinstance(value, dict):
        raise InvalidRequestError("the body must be a JSON object", code="invalid_json")
    if shape is not None:
        check_keys(value, shape)
    return value
