"""Exceptions that a user, a peer or the network can cause, and the one table that maps them to statuses.

    MiniInferError
    ├── InvalidRequestError      the request is wrong                  INVALID_ARGUMENT     400
    │   └── ContextLengthError   prompt (and output) do not fit
    ├── UnauthenticatedError     no or a wrong credential              UNAUTHENTICATED      401
    ├── NotFoundError            no such model, worker, request        NOT_FOUND            404
    ├── ConfigError              settings that cannot work             FAILED_PRECONDITION  500
    │   ├── UnsupportedModelError
    │   └── HandshakeError       two parts that do not fit together
    ├── OverloadedError          queue bound, pool or limit reached    RESOURCE_EXHAUSTED   429
    ├── UnavailableError         no worker left, draining              UNAVAILABLE          503
    ├── DeadlineExceededError                                          DEADLINE_EXCEEDED    504
    ├── TransferError            KV could not be moved or verified     ABORTED              500
    └── EngineError              one request failed inside a step      INTERNAL             500

Bugs are asserts or built-in exceptions; they are not in this table.
"""

from __future__ import annotations

import traceback
from dataclasses import dataclass


class MiniInferError(Exception):
    """Base of all errors whose message the client or user that caused them may see."""


class InvalidRequestError(MiniInferError):
    """A request that can never work as it is. param: the name of the wrong field."""

    def __init__(self, message: str, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.param = param
        self.code = code


class ContextLengthError(InvalidRequestError):
    """Prompt, or prompt and output, exceed the model's context. Worded as OpenAI does: clients search for that."""

    def __init__(self, max_model_len: int, however: str, param: str | None = "messages") -> None:
        message = f"This model's maximum context length is {max_model_len} tokens. However, {however}."
        super().__init__(message, param, "context_length_exceeded")


class UnauthenticatedError(MiniInferError):
    """The credential is missing or wrong."""


class NotFoundError(MiniInferError):
    """The model, worker or request does not exist."""


class ConfigError(MiniInferError):
    """Settings, files or a machine that cannot work; the message says what to do."""


class UnsupportedModelError(ConfigError):
    """An architecture, quantization or file format that the engine does not know."""


class HandshakeError(ConfigError):
    """Two parts of a cluster do not fit together; the message says what differs."""


class OverloadedError(MiniInferError):
    """A bound is reached; the same request may work later."""

    def __init__(self, message: str, retry_after_seconds: float = 1.0) -> None:
        super().__init__(message)
        self.retry_after_seconds = retry_after_seconds


class UnavailableError(MiniInferError):
    """Nobody can serve the request now: no worker, draining, connection lost."""


GRAMMAR_REFUSED = "the grammar "  # begins every message that refuses a client's grammar, wherever the fault was found


class DeadlineExceededError(MiniInferError):
    """The request's deadline is exceeded."""


class TransferError(MiniInferError):
    """KV blocks could not be read, or have the wrong content."""


class EngineError(MiniInferError):
    """One request failed inside an engine step; the others continue."""


@dataclass(frozen=True, slots=True)
class ErrorMapping:
    """gRPC and HTTP status of one exception type."""

    grpc_status: str  # name in grpc.StatusCode and, if it has it, in FailureCode
    http_status: int
    openai_type: str


# Ordered from special to general: the first match applies.
ERROR_TABLE: tuple[tuple[type[BaseException], ErrorMapping], ...] = (
    (InvalidRequestError, ErrorMapping("INVALID_ARGUMENT", 400, "invalid_request_error")),
    (UnauthenticatedError, ErrorMapping("UNAUTHENTICATED", 401, "authentication_error")),
    (NotFoundError, ErrorMapping("NOT_FOUND", 404, "invalid_request_error")),
    (OverloadedError, ErrorMapping("RESOURCE_EXHAUSTED", 429, "rate_limit_error")),
    (UnavailableError, ErrorMapping("UNAVAILABLE", 503, "service_unavailable_error")),
    (DeadlineExceededError, ErrorMapping("DEADLINE_EXCEEDED", 504, "timeout_error")),
    (TransferError, ErrorMapping("ABORTED", 500, "server_error")),
    (ConfigError, ErrorMapping("FAILED_PRECONDITION", 500, "server_error")),
    (EngineError, ErrorMapping("INTERNAL", 500, "server_error")),
)
INTERNAL = ErrorMapping("INTERNAL", 500, "server_error")


def mapping_for(error: BaseException) -> ErrorMapping:
    """Return the table's entry for `error`; unknown errors are internal."""
    for kind, mapping in ERROR_TABLE:
        if isinstance(error, kind):
            return mapping
    return INTERNAL


def public_message(error: BaseException) -> str:
    """Return the message that a client may see: the text of our own errors, none of an unexpected error's."""
    return str(error) if isinstance(error, MiniInferError) else "internal error"


def traceback_text(error: BaseException) -> str:
    """Format the stack of `error` and its causes. Only our own errors' messages are included: a built-in exception
    may quote the value that caused it, such as a prompt."""
    parts: list[str] = []
    seen: set[int] = set()
    current: BaseException | None = error
    while current is not None and id(current) not in seen:
        seen.add(id(current))
        message = f": {current}" if isinstance(current, MiniInferError) else ""
        frames = "".join(traceback.format_tb(current.__traceback__))
        parts.append(f"Traceback (most recent call last):\n{frames}{type(current).__name__}{message}")
        current = current.__cause__ or (None if current.__suppress_context__ else current.__context__)
    return "\n\nwhich came after\n\n".join(parts)
