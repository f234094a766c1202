"""The router's process: reads the tokenizers, listens, and serves until SIGTERM."""

from __future__ import annotations

import asyncio
import gc
import logging
import signal
import socket
import sys

import uvicorn
import uvloop

from common.config import SettingsParser, add_arguments, from_namespace
from common.errors import ConfigError
from common.logging import RateLimit, report_end, setup_logging, write_line
from common.model_files import resolve_model
from common.net.hosts import socket_family, with_port
from common.process import TRIM_SECONDS, share_one_heap, trim_heap
from common.text.load import load_tokenizer
from common.wings import call_wing
from router.app import create_app
from router.config import HttpConfig, RouterConfig
from router.gateway import Gateway
from router.http.chunk_writer import ChunkProtocol
from router.served_model import LoadedModel, serve_models

MAX_CONNECTIONS_WAITING = 1024
KEEPALIVE = {  # TCP options, because a client whose machine is gone sends no FIN
    socket.TCP_KEEPIDLE: 30,
    socket.TCP_KEEPINTVL: 10,
    socket.TCP_KEEPCNT: 3,
    socket.TCP_USER_TIMEOUT: 60_000,
}
GC_THRESHOLD = 50_000  # the default of 700 allocations would collect every few chunks
TICKS_A_SECOND = 10  # frequency of uvicorn's main loop


class Server(uvicorn.Server):
    """uvicorn that prints its address when it is ready, and returns free memory to the system now and then."""

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        if self.started and sockets:
            host, port = sockets[0].getsockname()[:2]
            write_line(f"router ready on http://{with_port(host, port)}", sys.stdout)

    async def on_tick(self, counter: int) -> bool:
        if counter % round(TRIM_SECONDS * TICKS_A_SECOND) == 0:
            trim_heap()
        return await super().on_tick(counter)


def main(argv: list[str] | None = None) -> int:
    share_one_heap()
    try:
        config, http = parse_settings(argv)
        setup_logging("router", config.log_level, config.log_format)
        protocol = protocol_for(http)
        several = call_wing("router.several_models.worker_table:named_models", config)
        named_models = several or [(config.served_model_name, config.model)]
        models = serve_models(config, [load(*named) for named in named_models])
        gateway = Gateway(config, models, http)
        listener = listen(config.host, config.port)
        with listener, asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            return runner.run(_serve(gateway, http, protocol, listener))
    except ConfigError as error:
        report_end("router", error)
        return 1


def load(name: str, model: str) -> LoadedModel:
    """Read from the files of `model` what a router needs. Raises ConfigError."""
    files = resolve_model(model, weights=False)
    return LoadedModel(name, files.name, load_tokenizer(files))


def parse_settings(argv: list[str] | None) -> tuple[RouterConfig, HttpConfig]:
    parser = SettingsParser(prog="router", description=RouterConfig.__doc__)
    add_arguments(parser.add_argument_group("router"), RouterConfig)
    add_arguments(parser.add_argument_group("HTTP connections"), HttpConfig)
    namespace = parser.parse_args(argv)
    return from_namespace(RouterConfig, namespace), from_namespace(HttpConfig, namespace)


def protocol_for(http: HttpConfig) -> type[ChunkProtocol]:
    """Return the protocol of clients' connections. Raises ConfigError if the settings allow more than possible."""
    return call_wing("router.connections.protocol:bounded_protocol", http) or ChunkProtocol


async def _serve(gateway: Gateway, http: HttpConfig, protocol: type[ChunkProtocol], listener: socket.socket) -> int:
    server = Server(
        uvicorn.Config(
            create_app(gateway),
            http=protocol,
            ws="none",
            access_log=False,
            log_config=None,
            server_header=False,
            date_header=False,
            proxy_headers=False,  # keeps the peer's address as the client: only loopback may drain workers
            backlog=MAX_CONNECTIONS_WAITING,
            timeout_keep_alive=round(http.idle_connection_seconds),
            timeout_graceful_shutdown=round(gateway.config.drain_grace_seconds),
        )
    )
    logging.getLogger("uvicorn.error").setLevel(logging.WARNING)
    for name in ("uvicorn.error", "asyncio"):
        logging.getLogger(name).addFilter(RateLimit())
    gc.collect()
    gc.freeze()  # objects from start-up live on: the collector need not scan them again
    gc.set_threshold(GC_THRESHOLD, 20, 20)
    # uvicorn shuts down on these signals, then raises them again: a handler must exist for exit code 0.
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: None)
    open_port = "router.metrics_port.port:open_metrics_port"
    close_port = call_wing(open_port, gateway.config, gateway.metrics_text) or (lambda: None)
    try:
        await server.serve(sockets=[listener])
    finally:
        close_port()
    return 0 if server.started else 1


def listen(host: str, port: int) -> socket.socket:
    """Open a listening socket. Raises ConfigError, which says what to do, when that fails."""
    listener = socket.socket(socket_family(host), socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)  # accepted sockets inherit these
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for option, value in KEEPALIVE.items():
            listener.setsockopt(socket.IPPROTO_TCP, option, value)
        listener.bind((host, port))
        listener.listen(MAX_CONNECTIONS_WAITING)
    except OSError as error:
        listener.close()
        raise ConfigError(
            f"cannot listen on {host}:{port} ({error.strerror}): choose another with --port or --host"
        ) from None
    return listener
