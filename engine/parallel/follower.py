"""`python -m engine.parallel.follower FD`: one rank of a model, which launches the plans that rank 0 sends it."""

from __future__ import annotations

import mmap
import os
import signal
import socket
import sys
import threading
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

import msgspec
import torch

from common.errors import MiniInferError
from common.logging import setup_logging
from common.model_files import resolve_model
from engine.cpu.runner import ModelRunner
from engine.kv_memory import pool_geometry, pool_over
from engine.loader import LoadedModel, load_model
from engine.parallel.followers import READY, FollowerPool, FollowerStart
from engine.parallel.group import GlooGroup
from engine.parallel.plan_ring import LENGTH, RingReader
from engine.plan import decode_plan

T = TypeVar("T")


def main() -> int:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # rank 0 decides when to stop
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    link = socket.socket(fileno=int(sys.argv[1]))
    start, _ = _receive(link, FollowerStart)
    setup_logging(f"rank {start.shard.rank}", "warning")
    torch.set_num_threads(start.engine.num_threads)
    try:
        loaded = load_model(resolve_model(start.engine.model), start.engine, torch.device("cpu"), start.shard)
        link.sendall(READY)
        pool, fds = _receive(link, FollowerPool)
        threading.Thread(target=_end_with_rank_0, args=(link,), daemon=True).start()
        runner = _make_runner(start, loaded, pool, fds[0])
    except MiniInferError as error:
        print(f"rank {start.shard.rank}: {error}", file=sys.stderr)
        return 1
    ring = RingReader(start.ring_fd, start.wake_fd, start.shard.rank - 1, start.shard.size - 1)
    while True:  # until rank 0 ends
        runner.launch(decode_plan(ring.read())).result()


def _make_runner(start: FollowerStart, loaded: LoadedModel, pool: FollowerPool, pool_fd: int) -> ModelRunner:
    """Join the group, and warm up together with the others."""
    config = replace(start.engine, num_gpu_blocks=pool.num_blocks)
    geometry = pool_geometry(loaded.config, config, loaded.fingerprint, loaded.dtype, start.shard)
    kv_pool = pool_over(mmap.mmap(pool_fd, geometry.pool_bytes), geometry)
    slots = torch.zeros(pool.num_host_slots, geometry.block_bytes, dtype=torch.uint8) if pool.num_host_slots else None
    group = GlooGroup(start.shard, Path(start.store))
    runner = ModelRunner(loaded, kv_pool, slots, config, group)
    runner.warmup()
    return runner


def _receive(link: socket.socket, kind: type[T]) -> tuple[T, list[int]]:
    """Ends the process when rank 0 is gone."""
    data, fds, _, _ = socket.recv_fds(link, LENGTH.size, 1)
    if len(data) < LENGTH.size:
        os._exit(1)
    (length,) = LENGTH.unpack(data)
    body = b""
    while len(body) < length:
        piece = link.recv(length - len(body))
        if not piece:
            os._exit(1)
        body += piece
    return msgspec.msgpack.decode(body, type=kind), fds


def _end_with_rank_0(link: socket.socket) -> None:
    """However rank 0 ends, its end of the link is closed; a collective would wait for it for minutes."""
    link.recv(1)
    os._exit(1)


if __name__ == "__main__":
    sys.exit(main())
