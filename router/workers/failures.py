"""Failures of workers: their exceptions, for clients or for a retry elsewhere, and a circuit breaker."""

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
# See Breaker.
MAX_FAILURES = 3
WINDOW_SECONDS = 5.0
OPEN_SECONDS = 5.0


class WorkerLostError(UnavailableError):
    """This worker cannot continue the request; another one may."""


def error_of(failure: pb.Failure) -> MiniInferError:
    """Return the exception for a worker's failure."""
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
        case _:  # internal to the cluster: no client can have caused it or should read it
            code = pb.FailureCode.Name(failure.code) if failure.code in pb.FailureCode.values() else failure.code
            name = failure.request_id
            logger.error("a worker refused %s as %s: %s", name, code, failure.message, extra=about(name))
            return EngineError("a worker refused the request")


class Breaker:
    """Keeps requests away from a worker for OPEN_SECONDS after MAX_FAILURES failures within WINDOW_SECONDS. Pure."""

    def __init__(self) -> None:
        self._failures: list[float] = []
        self._open_until = 0.0

    def record_failure(self, now: float) -> None:
        self._failures = [time for time in self._failures if now - time < WINDOW_SECONDS]
        self._failures.append(now)
        if len(self._failures) >= MAX_FAILURES:
            self._open_until = now + OPEN_SECONDS
            self._failures.clear()

    def record_success(self) -> None:
        self._failures.clear()

    def is_open(self, now: float) -> bool:
        return now < self._open_until
