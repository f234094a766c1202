"""Failures of workers as exceptions: which of them a client may read, and which are worth a retry elsewhere."""

from __future__ import annotations

import logging

from common.errors import (
    DeadlineExceededError,
    EngineError,
    InvalidRequestError,
    MiniInferError,
    OverloadedError,
    UnavailableError,
)
from common.logging import RateLimit, about
from protos import types_pb2 as pb

logger = logging.getLogger(__name__)
logger.addFilter(RateLimit())


class WorkerLostError(UnavailableError):
    """This worker cannot go on with the request; another one may."""


def error_of(failure: pb.Failure) -> MiniInferError:
    """The exception that a worker's failure stands for."""
    match failure.code:
        case pb.FAILURE_CODE_INVALID_ARGUMENT if failure.param:
            return InvalidRequestError(failure.message, failure.param, failure.error_code or None)
        case pb.FAILURE_CODE_RESOURCE_EXHAUSTED:
            return OverloadedError(failure.message)
        case pb.FAILURE_CODE_UNAVAILABLE:
            return WorkerLostError(failure.message)
        case pb.FAILURE_CODE_DEADLINE_EXCEEDED:
            return DeadlineExceededError(failure.message)
        case pb.FAILURE_CODE_INTERNAL:
            return EngineError(failure.message)
        case _:  # between this router and the worker: nothing that a client could have caused, or should read
            code = pb.FailureCode.Name(failure.code) if failure.code in pb.FailureCode.values() else failure.code
            name = failure.request_id
            logger.error("a worker refused %s as %s: %s", name, code, failure.message, extra=about(name))
            return EngineError("a worker refused the request")
