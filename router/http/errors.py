"""Errors in OpenAI's shape, and their log. common.errors.ERROR_TABLE maps exceptions to statuses."""

from __future__ import annotations

import logging
import math
import random
import uuid
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from typing import Any

import orjson
from starlette.responses import Response

from common.errors import (
    InvalidRequestError,
    MiniInferError,
    NotFoundError,
    OverloadedError,
    UnauthenticatedError,
    mapping_for,
    public_message,
    traceback_text,
)
from common.logging import RateLimit, about

logger = logging.getLogger(__name__)
logger.addFilter(RateLimit())
MAX_RETRY_SECONDS = 60  # the openai package ignores a longer Retry-After
ERROR_SHAPE = "router.error_shape"  # scope key of another API's function that converts OpenAI's errors to its own
# Scope key of a list of functions, applied in this order, that map a field's name to the client's name of it.
FIELD_NAMES = "router.field_names"
REQUEST_ID = "router.request_id"  # scope key of a request's id


class HttpError(MiniInferError):
    """Refusal of a request for the way it was sent, with its HTTP status."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


class ModelNotFoundError(NotFoundError):
    """The client names a model that is not served."""


def status_of(error: BaseException) -> int:
    if isinstance(error, HttpError):
        return error.status
    return mapping_for(error).http_status


def error_object(error: BaseException, scope: Mapping[str, Any]) -> dict[str, Any]:
    """Return the body of an error answer to the request of `scope`, or the data of an error event in a stream."""
    shape: Callable[[dict[str, Any]], dict[str, Any]] | None = scope.get(ERROR_SHAPE)
    body = _openai_error(error, scope.get(FIELD_NAMES, ()))
    return body if shape is None else shape(body)


def client_name(field: str, names_of: Sequence[Callable[[str], str]]) -> str:
    """Map a field to the client's name of it. names_of: see FIELD_NAMES."""
    for name_of in names_of:
        field = name_of(field)
    return field


def _openai_error(error: BaseException, field_names: Sequence[Callable[[str], str]]) -> dict[str, Any]:
    kind, param, code = mapping_for(error).openai_type, None, None
    message = public_message(error)
    if isinstance(error, HttpError):
        kind = "timeout_error" if error.status == 408 else "invalid_request_error"
    elif isinstance(error, InvalidRequestError):
        param, code = error.param, error.code
        if param is not None:
            name = client_name(param, field_names)
            message, param = message.replace(param, name), name
    elif isinstance(error, UnauthenticatedError):
        code = "invalid_api_key"
    elif isinstance(error, NotFoundError):
        code = "model_not_found" if isinstance(error, ModelNotFoundError) else "not_found"
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


def error_headers(error: BaseException) -> dict[str, str]:
    headers = {"content-type": "application/json"}
    if isinstance(error, OverloadedError):
        headers["retry-after"] = str(retry_after(error.retry_after_seconds, random.random()))
    elif status_of(error) == 503:
        headers["retry-after"] = "1"
    elif isinstance(error, UnauthenticatedError):
        headers["www-authenticate"] = "Bearer"
    return headers


def retry_after(expected_seconds: float, draw: float) -> int:
    """Return the whole seconds after which to retry at a server that expects room in `expected_seconds`.

    Clients that are refused together must not retry together: `draw`, uniform in [0, 1), adds up to half as much
    again, or up to two seconds if that is more.
    """
    first = min(max(math.ceil(expected_seconds), 1), MAX_RETRY_SECONDS * 2 // 3)
    return first + int(draw * (max(first // 2, 2) + 1))


def error_response(error: BaseException, scope: Mapping[str, Any], headers: Mapping[str, str]) -> Response:
    """Return the response for an error. headers: added to its own."""
    return Response(orjson.dumps(error_object(error, scope)), status_of(error), {**error_headers(error), **headers})


def log_if_internal(scope: MutableMapping[str, Any], error: BaseException) -> str:
    """Log an internal error, once per request; return the id that it was logged under, or '' for other errors."""
    if status_of(error) != 500:
        return ""
    log_id: str | None = scope.get("router.logged_id")
    if log_id is None:
        log_id = scope["router.logged_id"] = scope.get(REQUEST_ID) or f"req-{uuid.uuid4().hex}"
        logger.error("request %s failed with status 500\n%s", log_id, traceback_text(error), extra=about(log_id))
    return log_id
