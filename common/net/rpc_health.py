"""gRPC health checks (`grpc.health.v1`) for unauthenticated callers, of whom nothing is read.

All services of a server are ready or not together, so the name that a caller sends does not matter, and an unknown
one is not told apart. Both methods are registered as streams: grpc.aio receives the request of a unary method first,
up to the limit that is meant for prompts, and what was received stays in memory until the garbage collector runs.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import grpc
from grpc_health.v1 import health, health_pb2

MAX_WATCHERS = 64

if TYPE_CHECKING:  # the stubs make these generic; at run time they are not
    Context = grpc.aio.ServicerContext[Any, Any]
    GenericHandler = grpc.GenericRpcHandler[Any, Any]
else:
    Context = grpc.aio.ServicerContext
    GenericHandler = grpc.GenericRpcHandler


class HealthService:
    """Readiness of a whole server; not serving until it is set."""

    def __init__(self) -> None:
        self.is_serving = False
        self._changed = asyncio.Condition()
        self._num_watchers = 0

    async def set_serving(self, serving: bool) -> None:
        async with self._changed:
            self.is_serving = serving
            self._changed.notify_all()

    def handler(self) -> GenericHandler:
        """What a server's `add_generic_rpc_handlers` takes."""
        serialize = health_pb2.HealthCheckResponse.SerializeToString
        methods = {
            "Check": grpc.stream_stream_rpc_method_handler(self._check, response_serializer=serialize),
            "Watch": grpc.stream_stream_rpc_method_handler(self._watch, response_serializer=serialize),
        }
        return grpc.method_handlers_generic_handler(health.SERVICE_NAME, methods)

    async def _check(self, _requests: Any, context: Context) -> None:
        await context.write(_response(self.is_serving))

    async def _watch(self, _requests: Any, context: Context) -> None:
        if self._num_watchers == MAX_WATCHERS:
            await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, "too many watchers")
        self._num_watchers += 1
        try:
            while True:
                told = self.is_serving
                await context.write(_response(told))
                async with self._changed:
                    while self.is_serving == told:
                        await self._changed.wait()
        finally:
            self._num_watchers -= 1


def _response(serving: bool) -> health_pb2.HealthCheckResponse:
    status = health_pb2.HealthCheckResponse.SERVING if serving else health_pb2.HealthCheckResponse.NOT_SERVING
    return health_pb2.HealthCheckResponse(status=status)
