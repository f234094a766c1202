"""gRPC set-up of every service: channel options, cluster token, health, reflection, error mapping.

Internal ports do not encrypt user data: they bind to loopback unless a cluster token is configured
(`common.net.hosts.check_bind`). The token is sent as metadata and compared in constant time.
"""

from __future__ import annotations

import asyncio
import hmac
from collections.abc import Awaitable, Callable
from typing import Any, TypeAlias

import grpc
from grpc_health.v1 import health, health_pb2
from grpc_reflection.v1alpha import reflection

from common.errors import ConfigError, MiniInferError, mapping_for, public_message
from common.net.hosts import check_bind, with_port

TOKEN_KEY = "mini-infer-token"
MAX_REQUEST_BYTES = 8 << 20  # a prompt of a million tokens takes 4 MB, its KV handle included
MAX_REPLY_BYTES = 64 << 20  # a snapshot of cached keys, log-probabilities of a long prompt
MAX_CALLS_PER_CONNECTION = 256
MAX_WATCHERS = 64

Context: TypeAlias = "grpc.aio.ServicerContext[Any, Any]"  # generic only in the stubs

CHANNEL_OPTIONS: tuple[tuple[str, int], ...] = (
    ("grpc.keepalive_time_ms", 5_000),
    ("grpc.keepalive_timeout_ms", 3_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.max_receive_message_length", MAX_REPLY_BYTES),
    ("grpc.max_send_message_length", MAX_REQUEST_BYTES),
    # A worker that restarts at the same address must be reachable at once.
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 1_000),
    ("grpc.use_local_subchannel_pool", 1),
)
SERVER_OPTIONS: tuple[tuple[str, int], ...] = (
    ("grpc.keepalive_time_ms", 5_000),
    ("grpc.keepalive_timeout_ms", 3_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.min_recv_ping_interval_without_data_ms", 1_000),
    ("grpc.http2.max_ping_strikes", 0),
    ("grpc.max_receive_message_length", MAX_REQUEST_BYTES),
    ("grpc.max_send_message_length", MAX_REPLY_BYTES),
    ("grpc.max_concurrent_streams", MAX_CALLS_PER_CONNECTION),
    # Without probes, windows stay at 64 KiB until a call reads its message. With probes they grow while a server gets
    # no CPU time, and so does the memory that strangers can make it use. A prompt of 1 MB takes 0.5 ms longer.
    ("grpc.http2.bdp_probe", 0),
    ("grpc.so_reuseport", 0),  # two servers on one port are a mistake, not a feature
)


def token_metadata(token: str) -> tuple[tuple[str, str], ...]:
    """Return call metadata with the cluster token; empty without a token."""
    return ((TOKEN_KEY, token),) if token else ()


class TokenInterceptor(grpc.aio.ServerInterceptor):  # type: ignore[type-arg]
    """Answers UNAUTHENTICATED to every call without the cluster token, except health checks.

    It denies unary calls as streams, too: grpc.aio would first receive the whole request of a unary call.
    """

    def __init__(self, token: str) -> None:
        self._token = token.encode()

        async def deny(_requests: Any, context: Context) -> None:
            await context.abort(grpc.StatusCode.UNAUTHENTICATED, "cluster token missing or wrong")

        self._deny = grpc.stream_stream_rpc_method_handler(deny)

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler[Any, Any]]],
        details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler[Any, Any]:
        handler = await continuation(details)
        if handler is None or details.method.startswith("/grpc.health."):
            return handler
        sent = dict(details.invocation_metadata).get(TOKEN_KEY, "")
        sent_bytes = sent if isinstance(sent, bytes) else str(sent).encode()
        if hmac.compare_digest(sent_bytes, self._token):
            return handler
        return self._deny


class HealthService:
    """Readiness of a whole server, for unauthenticated callers, whose requests it does not read. First NOT_SERVING.

    All services have the same readiness, so the name that a caller sends does not matter, even an unknown one. Both
    methods are registered as streams: grpc.aio receives the request of a unary method first, up to the limit for
    prompts, and keeps it in memory until the garbage collector runs.
    """

    def __init__(self) -> None:
        self.is_serving = False
        self._changed = asyncio.Condition()
        self._num_watchers = 0

    async def set_serving(self, serving: bool) -> None:
        async with self._changed:
            self.is_serving = serving
            self._changed.notify_all()

    def handler(self) -> grpc.GenericRpcHandler[Any, Any]:
        """Return the handler for a server's `add_generic_rpc_handlers`."""
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
                last_sent = self.is_serving
                await context.write(_response(last_sent))
                async with self._changed:
                    while self.is_serving == last_sent:
                        await self._changed.wait()
        finally:
            self._num_watchers -= 1


def _response(serving: bool) -> health_pb2.HealthCheckResponse:
    status = health_pb2.HealthCheckResponse.SERVING if serving else health_pb2.HealthCheckResponse.NOT_SERVING
    return health_pb2.HealthCheckResponse(status=status)


class RpcServer:
    """An asyncio gRPC server with health and reflection. `add` services, then `start`."""

    def __init__(self, host: str, port: int, token: str = "") -> None:
        check_bind(host, token)
        interceptors = (TokenInterceptor(token),) if token else ()
        self._server = grpc.aio.server(interceptors=interceptors, options=SERVER_OPTIONS)
        self.health = HealthService()  # of all services of this server
        self._names = [health.SERVICE_NAME, reflection.SERVICE_NAME]
        self._server.add_generic_rpc_handlers((self.health.handler(),))
        self.host = host
        try:
            self.port: int = self._server.add_insecure_port(with_port(host, port))
        except RuntimeError:
            self.port = 0
        if self.port == 0:
            raise ConfigError(f"port {port} on {host} is taken or not allowed: choose another with --port")

    @property
    def address(self) -> str:
        return with_port(self.host, self.port)

    def add(self, adder: Callable[[Any, grpc.aio.Server], None], servicer: Any, full_name: str) -> None:
        """Register `servicer`. adder: its generated `add_..._to_server` function."""
        adder(servicer, self._server)
        self._names.append(full_name)

    async def start(self) -> None:
        reflection.enable_server_reflection(self._names, self._server)
        await self._server.start()

    async def stop(self, grace_seconds: float) -> None:
        await self._server.stop(grace_seconds)


def open_channel(address: str) -> grpc.aio.Channel:
    """Open a channel with this project's keepalive and size options."""
    return grpc.aio.insecure_channel(address, options=CHANNEL_OPTIONS)


async def abort_with(context: Context, error: MiniInferError) -> None:
    """End a call with the error's status in the exception table."""
    code = getattr(grpc.StatusCode, mapping_for(error).grpc_status)
    await context.abort(code, public_message(error))
