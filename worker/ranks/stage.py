"""`python -m worker.ranks.stage`: the first stage of a pipeline whose engine runs on another host.

It waits for an engine and starts a process for it, which ends with the engine's connection; then it waits again.
"""

from __future__ import annotations

import hmac
import logging
import socket
import subprocess
import sys
from dataclasses import dataclass

import msgspec

from common import VERSION
from common.config import from_args, setting
from common.errors import ConfigError
from common.logging import FORMAT_HELP, FORMATS, LEVEL_HELP, LEVELS, report_end, setup_logging
from common.net.hosts import check_bind
from common.process import exit_on_sigterm
from engine.pipeline_parallel.remote_stage import StageHello
from engine.pipeline_parallel.socket_frames import receive_frame, send_frame, watch_peer

logger = logging.getLogger("stage")
HELLO_SECONDS = 5.0


@dataclass(frozen=True)
class StageConfig:
    """Settings of a stage; what it computes, its engine says."""

    host: str = setting("127.0.0.1", "address to listen on; others than loopback need --cluster-token")
    port: int = setting(7070, "port to listen on")
    cluster_token: str = setting("", "secret of all services; better set by MINI_INFER_CLUSTER_TOKEN")
    log_level: str = setting("info", LEVEL_HELP, choices=LEVELS)
    log_format: str = setting("text", FORMAT_HELP, choices=FORMATS)


def main(argv: list[str] | None = None) -> int:
    try:
        config = from_args(StageConfig, argv, "worker.ranks.stage")
        setup_logging("stage", config.log_level, config.log_format)
        check_bind(config.host, config.cluster_token)
        listener = _listen(config)
    except ConfigError as error:
        report_end("stage", error)
        return 1
    logger.info("waiting for an engine on %s:%d", config.host, listener.getsockname()[1])
    while True:
        sock, peer = listener.accept()
        with sock:
            if _admits(sock, config.cluster_token):
                logger.info("an engine at %s has come", peer[0])
                status = _serve(sock)
                logger.info("its stage ended with status %d", status)


def _listen(config: StageConfig) -> socket.socket:
    try:
        return socket.create_server((config.host, config.port))
    except OSError as error:
        raise ConfigError(f"cannot listen on {config.host}:{config.port}: {error.strerror}") from None


def _admits(sock: socket.socket, token: str) -> bool:
    """Answer the engine's first frame; return whether it is accepted."""
    sock.settimeout(HELLO_SECONDS)
    try:
        watch_peer(sock)
        hello = msgspec.msgpack.decode(receive_frame(sock), type=StageHello)
        refusal = ""
        if not hmac.compare_digest(hello.token.encode(), token.encode()):
            refusal = "the stage has another cluster token: set the same MINI_INFER_CLUSTER_TOKEN on both hosts"
        elif hello.version != VERSION:
            refusal = f"the stage runs version {VERSION}, the engine {hello.version}: run the same on both hosts"
        send_frame(sock, msgspec.msgpack.encode(refusal))
    except (OSError, msgspec.DecodeError) as error:
        logger.warning("a connection without an engine: %s", error)
        return False
    if refusal:
        logger.warning("refused: %s", refusal)
    sock.settimeout(None)
    return not refusal


def _serve(sock: socket.socket) -> int:
    process = subprocess.Popen(
        [sys.executable, "-m", "engine.tensor_parallel.follower", str(sock.fileno())],
        stdin=subprocess.DEVNULL,
        pass_fds=(sock.fileno(),),
    )
    sock.close()  # otherwise the engine would not notice the process's end
    try:
        return process.wait()
    finally:
        process.kill()


if __name__ == "__main__":
    exit_on_sigterm()
    sys.exit(main())
