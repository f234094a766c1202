"""Life cycle of a worker process: bind, start the engine, serve, drain on SIGTERM, end.

`python -m prefill_service` and `python -m decode_service` only call `run_worker`.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
import signal
import tempfile
import time

from msgspec.structs import replace

from common import VERSION
from common.config import SettingsParser, add_arguments, from_namespace
from common.errors import ConfigError, UnavailableError
from common.logging import report_end, setup_logging
from common.net.hosts import with_port
from common.net.rpc import RpcServer
from common.process import TRIM_SECONDS, share_one_heap, trim_heap
from common.wings import call_wing, from_wing
from engine.config import EngineConfig, GpuConfig
from protos import types_pb2 as pb
from worker.config import WorkerConfig
from worker.front.engine_client import EngineClient
from worker.front.front import WorkerFront
from worker.front.servicer import WorkerServicer, add_kv_service, register
from worker.messages import Start

WATCH_INTERVAL_SECONDS = 0.25
DRAIN_INTERVAL_SECONDS = 0.05
STOP_SECONDS = 0.2  # for replies in flight; a peer's idle channel delays the stop by all of it


def parse_settings(role: str) -> Start:
    parser = SettingsParser(prog=f"{role}_service", description=f"A {role} worker: one engine behind gRPC.")
    add_arguments(parser.add_argument_group("worker"), WorkerConfig)
    add_arguments(parser.add_argument_group("engine"), EngineConfig)
    add_arguments(parser.add_argument_group("GPU"), GpuConfig)
    namespace = parser.parse_args()
    return Start(
        from_namespace(WorkerConfig, namespace),
        from_namespace(EngineConfig, namespace),
        from_namespace(GpuConfig, namespace),
    )


def run_worker(role: str) -> int:
    """Run a worker until SIGTERM (0), or until its engine fails or cannot start (1)."""
    share_one_heap()
    try:
        settings = parse_settings(role)
        if role == "prefill" and settings.engine.stage_address:
            raise ConfigError(
                "--stage-address: KV of the other host's layers cannot be handed over: use a decode worker"
            )
        setup_logging(role, settings.worker.log_level, settings.worker.log_format)
        with _run_directory(settings.worker.run_dir) as run_dir:
            return asyncio.run(_serve(role, settings, run_dir))
    except ConfigError as error:
        report_end(role, error)
        return 1


def _run_directory(run_dir: str) -> contextlib.AbstractContextManager[str]:
    """Open the directory shared with other workers, or a private one, which is removed when this worker ends."""
    if run_dir:
        return contextlib.nullcontext(run_dir)
    return tempfile.TemporaryDirectory(prefix="mini-infer-", ignore_cleanup_errors=True)


async def _serve(role: str, settings: Start, run_dir: str) -> int:
    logger = logging.getLogger(role)
    stopping = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stopping.set)
    config = settings.worker
    server = RpcServer(config.host, config.port, config.cluster_token)
    worker = dataclasses.replace(config, worker_id=config.worker_id or f"{role}-{server.port}", run_dir=run_dir)
    began = time.monotonic()
    address = with_port(worker.advertise_host or worker.host, server.port)
    engine = await _start_engine(replace(settings, worker=worker, kv_address=address), stopping)
    if engine is None:
        logger.info("stopped while loading")
        return 0
    try:
        info = pb.WorkerInfo(worker_id=worker.worker_id, role=role, version=VERSION)
        info.MergeFromString(engine.ready.info)
        front = WorkerFront(engine, info)
        kv_service = add_kv_service(server, engine, worker, front)
        call_wing("worker.metrics_port.worker_metrics:open_metrics_port", front, worker, server)
        kind_of_servicer = from_wing("worker.drains.servicer:DrainServicer") or WorkerServicer
        register(role, server, kind_of_servicer(front))
        await server.start()
        await server.health.set_serving(True)
        logger.info("%s ready on %s in %.1f s", worker.worker_id, server.address, time.monotonic() - began)
        status = await _watch(server, front, engine, worker, stopping, logger)
        kv_service.close()
    finally:
        await engine.stop()
    await server.stop(STOP_SECONDS)
    return status


async def _start_engine(message: Start, stopping: asyncio.Event) -> EngineClient | None:
    """Start the engine and load its model; None if `stopping` is set first. Raises ConfigError."""
    start = asyncio.create_task(EngineClient.start(message))
    stop = asyncio.create_task(stopping.wait())
    await asyncio.wait([start, stop], return_when=asyncio.FIRST_COMPLETED)
    if start.done():
        stop.cancel()
        return start.result()
    start.cancel()
    await asyncio.wait([start])
    return None


async def _watch(
    server: RpcServer,
    front: WorkerFront,
    engine: EngineClient,
    worker: WorkerConfig,
    stopping: asyncio.Event,
    logger: logging.Logger,
) -> int:
    """Serve until the worker is drained or its engine is gone or hangs for good; return the exit status."""
    running = asyncio.create_task(front.run())
    serving, next_trim = True, 0.0
    while True:
        interval = DRAIN_INTERVAL_SECONDS if front.is_draining else WATCH_INTERVAL_SECONDS
        await asyncio.wait([running], timeout=interval)
        now = time.monotonic()
        if running.done():
            await server.health.set_serving(False)
            # `run` always ends with UnavailableError, after it has closed the streams
            logger.error("this worker ends: %s", running.exception())
            return 1
        if stopping.is_set() and front.drain is not None:
            front.drain.start(worker.drain_grace_seconds, now, is_final=True)
        if front.is_drained or (stopping.is_set() and front.drain is None):
            break
        try:
            if engine.watch is not None:
                engine.watch.judge(front, now)
        except UnavailableError as error:
            logger.error("this worker ends: %s", error)
            return 1
        if now >= next_trim:
            trim_heap()
            front.measure_memory()
            next_trim = now + TRIM_SECONDS
        front.heartbeat()
        if serving != front.is_serving:
            serving = front.is_serving
            await server.health.set_serving(serving)
    await server.health.set_serving(False)
    front.leave_service("the worker has stopped")
    await asyncio.sleep(0.1)  # let the last reports leave
    running.cancel()
    return 0
