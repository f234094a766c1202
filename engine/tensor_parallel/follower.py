"""`python -m engine.tensor_parallel.follower FD`: another rank, which launches the plans that rank 0 sends."""

from __future__ import annotations

import gc
import mmap
import os
import signal
import socket
import sys
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import msgspec
import torch

from common.errors import MiniInferError
from common.logging import report_end, setup_logging
from common.model_files import resolve_model
from engine.assembly import adapters_of
from engine.cpu.runner import CpuRunner
from engine.cuda_ipc.device_memory import shareable_pool
from engine.kv.memory import allocate_pool, pool_geometry, pool_over
from engine.loader.load import LoadedModel, load_model
from engine.pipeline_parallel.hidden_ring import RingSink, RingSource
from engine.pipeline_parallel.socket_frames import SocketSink, receive_frame, send_frame
from engine.pipeline_parallel.unsampled import UnsampledStep
from engine.plan import PendingStep
from engine.tensor_parallel.assembly import cpu_ranks
from engine.tensor_parallel.followers import (
    READY,
    FollowerLoaded,
    FollowerPool,
    FollowerStart,
    FollowerStep,
    receive_fds,
)
from engine.tensor_parallel.group import GlooGroup
from engine.tensor_parallel.plan_ring import LENGTH, RingReader
from kvstore.layout import PoolGeometry

T = TypeVar("T")


def main() -> int:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # rank 0 decides when the process stops
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    link = socket.socket(fileno=int(sys.argv[1]))
    start, _ = _receive(link, FollowerStart)
    setup_logging(f"rank {start.rank}", "warning", start.log_format)
    try:
        runner = _start(link, start)
    except MiniInferError as error:
        report_end(f"rank {start.rank}", error)
        return 1
    if start.is_remote:
        return follow(partial(_plan_from, link), runner)
    ring = RingReader(start.ring_fd, start.wake_fd, start.rank - 1, start.engine.num_ranks - 1)
    return follow(ring.read, runner)


def follow(read: Callable[[], bytes], runner: Any) -> NoReturn:
    """Launch steps as their plans come, until rank 0 ends."""
    decoder = msgspec.msgpack.Decoder(FollowerStep)
    in_flight: deque[PendingStep] = deque()
    num_finished = 0
    while True:
        step = decoder.decode(read())
        for sampled in step.sampled:
            pending = in_flight.popleft()
            if isinstance(pending, UnsampledStep):
                pending.take(sampled)
            else:  # a peer of rank 0 has sampled the same tokens
                pending.result()
            num_finished += 1
        while num_finished < step.num_finished:
            in_flight.popleft().result()
            num_finished += 1
        in_flight.append(runner.launch(step.plan))


def _start(link: socket.socket, start: FollowerStart) -> Any:
    """Load this rank's part of the model, join the group and warm up together with the other ranks."""
    on_gpu = start.device == "cuda"
    if start.engine.num_threads:
        torch.set_num_threads(start.engine.num_threads)
    device = torch.device("cuda", 0 if start.is_remote else start.rank) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(device)
    loaded = load_model(resolve_model(start.engine.model), start.engine, device, start.shard, stage=start.stage)
    adapters = adapters_of(loaded, start.engine)  # before the pool is sized: they take GPU memory
    send_frame(link, msgspec.msgpack.encode(FollowerLoaded(loaded.fingerprint, _num_blocks(loaded, start))))
    pool, fds = _receive(link, FollowerPool)
    config = replace(start.engine, num_gpu_blocks=pool.num_blocks)
    geometry = pool_geometry(loaded.config, config, loaded.fingerprint, loaded.dtype, loaded.shard)
    slots = torch.zeros(pool.num_host_slots, geometry.block_bytes, dtype=torch.uint8) if pool.num_host_slots else None
    folder, is_alone = Path(start.folder), start.shard.size == 1
    runner: Any
    if on_gpu:
        from engine.gpu.runner import GpuRunner
        from engine.pipeline_parallel.gpu_stages import open_ends
        from engine.tensor_parallel.gpu_group import open_group  # both need triton
        from engine.tensor_parallel.gpu_seams import gpu_ranks

        kv_pool = _shared_pool(link, geometry, device) if pool.is_shared else allocate_pool(geometry, device)
        exchange = partial(_exchange, link, start.shard.size)
        devices = None if is_alone else open_group(loaded, config, exchange, folder)
        if start.is_remote:
            ranks = gpu_ranks(loaded, config, devices, sink=SocketSink(link, _end))
        else:
            _watch(link)
            ranks = gpu_ranks(loaded, config, devices, *open_ends(loaded, config, folder))
        if adapters is None:
            runner = GpuRunner(loaded, kv_pool, slots, config, start.gpu, pool.max_model_len, ranks)
        else:
            sized = {"gpu": start.gpu, "max_model_len": pool.max_model_len}
            runner = adapters.runner(loaded, kv_pool, slots, config, ranks, **sized)
    elif start.is_remote:
        alone = cpu_ranks(loaded, config, sink=SocketSink(link, _end))
        runner = CpuRunner(loaded, allocate_pool(geometry, device), slots, config, alone)
    else:
        _watch(link)
        kv_pool = pool_over(mmap.mmap(fds[0], geometry.pool_bytes), geometry)
        group = None if is_alone else GlooGroup(loaded.shard, folder)
        source = None if start.hidden_in is None else RingSource(start.hidden_in)
        sink = None if start.hidden_out is None else RingSink(start.hidden_out)
        own = cpu_ranks(loaded, config, group, source, sink)
        make = CpuRunner if adapters is None else adapters.runner
        runner = make(loaded, kv_pool, slots, config, own)
    if loaded.constraints is not None:
        loaded.constraints.prepare()
    runner.warmup()
    gc.collect()
    gc.freeze()  # loaded objects stay alive; traversing them would add 90 ms to some steps
    return runner


def _plan_from(link: socket.socket) -> bytes:
    """Receive a plan. Ends the process if the engine has ended."""
    try:
        return bytes(receive_frame(link))
    except OSError:
        _end()


def _end() -> NoReturn:
    os._exit(1)


def _num_blocks(loaded: LoadedModel, start: FollowerStart) -> int:
    """Return how many KV blocks fit the GPU of a stage, whose layers differ from rank 0's; else 0."""
    config = start.engine
    if start.device != "cuda" or start.stage is None or config.num_gpu_blocks or config.kv_cache_gb:
        return 0
    from engine.memory_profiling.profile import num_blocks_that_fit  # both need triton
    from engine.tensor_parallel.gpu_seams import in_trials

    max_model_len = loaded.config.context_length(config.max_model_len)
    return num_blocks_that_fit(loaded, config, start.gpu, max_model_len, *in_trials(loaded, config))


def _shared_pool(link: socket.socket, geometry: PoolGeometry, device: torch.device) -> torch.Tensor:
    """Allocate a pool that rank 0 maps, too."""
    kv_pool, fd = shareable_pool(geometry, device)
    socket.send_fds(link, [READY], [fd])
    os.close(fd)
    return kv_pool


def _exchange(link: socket.socket, size: int, fd: int) -> list[int]:
    socket.send_fds(link, [READY], [fd])
    return receive_fds(link, size, "rank 0")


def _receive(link: socket.socket, kind: type[T]) -> tuple[T, list[int]]:
    """Receive a message. Ends the process if rank 0 has ended."""
    begun, fds, _, _ = socket.recv_fds(link, LENGTH.size, 1)
    try:
        return msgspec.msgpack.decode(receive_frame(link, begun=begun), type=kind), fds
    except ConnectionError:
        _end()


def _watch(link: socket.socket) -> None:
    threading.Thread(target=_end_with_rank_0, args=(link,), daemon=True).start()


def _end_with_rank_0(link: socket.socket) -> None:
    """End with rank 0, whose end closes the link; a collective would wait for minutes."""
    link.recv(1)
    _end()


if __name__ == "__main__":
    sys.exit(main())
