"""Reads a request's JSON body and validates its fields, with error messages in terms of the API.

Raises HttpError or InvalidRequestError, and the errors of bounds on all bodies. A field is honoured, harmless by the
lists of `router/foreign_fields`, or refused with a message that names it; none is ignored silently. Bodies that JSON
parsers read differently (NaN, lone surrogates; duplicate keys with `router/body_bounds`) are refused, because a proxy
in front may have read something else.
"""

from __future__ import annotations

import asyncio
from typing import Any, TypeVar

import orjson
from pydantic import ValidationError
from starlette.requests import ClientDisconnect, Request
from starlette.types import Scope

from common.errors import InvalidRequestError
from common.wings import call_wing
from router.api.schemas import Body, Message
from router.http.errors import HttpError

B = TypeVar("B", bound=Body)
MAX_BODY_BYTES = 16 << 20
BODY_TIMEOUT_SECONDS = 30.0
MAX_NAME_CHARS = 64  # of a field, in errors: clients may send names of megabytes


async def read_json_object(request: Request) -> dict[str, Any]:
    """Read the body as a JSON object."""
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
    shape = call_wing("router.body_bounds.json_shape:checked_shape", body)
    try:
        value = orjson.loads(body)
    except orjson.JSONDecodeError as error:
        what = "empty" if not body else "not valid JSON"
        place = f" (at byte {error.pos})" if body else ""
        raise InvalidRequestError(f"the body is {what}{place}", code="invalid_json") from None
    if not isinstance(value, dict):
        raise InvalidRequestError("the body must be a JSON object", code="invalid_json")
    call_wing("router.body_bounds.json_shape:check_keys", value, shape)
    return value


def parse_body(kind: type[B], fields: dict[str, Any], scope: Scope | None = None) -> B:
    """Validate `fields`. Raises InvalidRequestError, which names the field.

    scope: the request's scope, which collects fields without effect for a header of the answer.
    """
    own = call_wing("router.foreign_fields.advice:own_fields_of", kind.model_fields, kind.no_effect, fields, scope)
    try:
        return kind.model_validate(fields if own is None else own)
    except ValidationError as error:
        raise _first_error(kind, error) from None


def _first_error(kind: type[Body], error: ValidationError) -> InvalidRequestError:
    first = error.errors(include_url=False, include_input=False, include_context=False)[0]
    loc = first["loc"]
    if rule := _rule_of_union(kind, loc, first["type"]):
        return rule
    param = ".".join(str(part)[:MAX_NAME_CHARS] for part in loc) or None
    if first["type"] == "extra_forbidden":
        return InvalidRequestError(f"unknown field {param or repr('')}", param, "unknown_parameter")
    if first["type"] == "missing":
        return InvalidRequestError(f"{param} is required", param, "missing_required_parameter")
    if first["type"] == "model_type":  # pydantic's message names our classes
        return InvalidRequestError(f"{param} must be an object", param)
    return InvalidRequestError(f"{param or 'body'}: {first['msg']}", param)


def _rule_of_union(kind: type[Body], loc: tuple[int | str, ...], error_type: str) -> InvalidRequestError | None:
    """Return an error that lists the allowed values of a union, if the field has a description of them: pydantic
    would say for each alternative why it does not match."""
    is_content = loc[:1] == ("messages",) and loc[2:3] == ("content",)
    model, path = (Message, loc[:3]) if is_content else (kind, loc[:1])
    field = model.model_fields.get(str(path[-1])) if path else None
    if field is None or field.description is None or (error_type == "missing" and loc == path):
        return None
    param = ".".join(str(part) for part in path)
    return InvalidRequestError(f"{param} must be {field.description}", param)
