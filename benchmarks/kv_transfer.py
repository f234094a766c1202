"""Speed of KV transfers from one worker's pool to another's, by each transport, and from a pool to host slots.

    python -m benchmarks.kv_transfer [--shape qwen2.5-7b] [--tokens 1024,4096] [--transports shm,tcp] [--json]

Two processes of this host with the workers' own code: pool, leases, KvTransfer service, digests. Every pull is of a
lease of its own, four in a row: the times are those from KV handle to verified blocks, medians over all pulls, and
for a GPU's shm and tcp they contain the copies through pinned host memory at both ends. `first` is the first of each
four, for which the reader's process has waited idle; `grant` is what the owner pays when it hands a prompt out. With
two GPUs, `--owner-device cuda:1` measures the link between them, and `--transports nccl` NCCL over it (the first pull
connects; `--piece-mb` changes the size of its messages). On a busy machine, compare with `copy`, a plain copy of the
same bytes within one pool in the same run.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import functools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from benchmarks.harness import int_list
from benchmarks.kv_peers import Reader, as_words, serve_owner
from engine.host_tier.gpu_copies import HostCopies
from kvstore.handle.handle import PeerLease, open_handle
from kvstore.layout import PoolGeometry, full_attention
from kvstore.types import BlockId, HostSlot
from protos import types_pb2 as pb
from worker.nccl import pool as nccl_pool

SHAPES = {"qwen2.5-7b": (28, 4, 128), "smollm2-135m": (30, 3, 64), "qwen3-0.6b": (28, 8, 128)}
WARM_UP = 2
NUM_LEASES = 4  # prompts that are granted, then pulled one after another
Ask = Callable[[int], tuple[PeerLease, float]]
"""Returns a lease on a number of blocks, and the seconds that granting it took."""


def median_seconds(run: Callable[[], float], rounds: int) -> float:
    return statistics.median([run() for _ in range(WARM_UP + rounds)][WARM_UP:])


def timed(run: Callable[[], object], device: torch.device) -> float:
    """Return the seconds until the device is done."""
    synchronize(device)
    began = time.perf_counter()
    run()
    synchronize(device)
    return time.perf_counter() - began


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def report(
    options: argparse.Namespace, what: str, tokens: int, num_bytes: int, seconds: float, **more: float
) -> None:
    figures = {"ms": seconds * 1e3, "gb_per_s": num_bytes / seconds / 1e9, **more}
    rounded = {name: float(f"{value:.4g}") for name, value in figures.items()}
    if options.json:
        print(json.dumps({"what": what, "shape": options.shape, "tokens": tokens, **rounded}), flush=True)
        return
    columns = "".join(f"  {name} {value:<8}" for name, value in rounded.items())
    print(f"{what:>10} {tokens:6} tokens {num_bytes / 1e6:8.1f} MB{columns}", flush=True)


def measure_transport(options: argparse.Namespace, geometry: PoolGeometry, folder: str, name: str, ask: Ask) -> None:
    device = torch.device(options.device)
    reader = Reader(geometry, device, folder, name)
    for tokens in options.tokens:
        num_blocks = tokens // options.block_size
        num_bytes = num_blocks * geometry.block_bytes
        grants: list[float] = []
        pulls: list[list[float]] = []  # of each round, in order
        for _ in range(WARM_UP + options.rounds):
            granted = [ask(num_blocks) for _ in range(NUM_LEASES)]
            grants.extend(seconds for _, seconds in granted)
            pulls.append(reader.pull([lease for lease, _ in granted]))
        timed_pulls = pulls[WARM_UP:]
        first_ms = statistics.median([of_round[0] for of_round in timed_pulls]) * 1e3
        seconds = statistics.median([each for of_round in timed_pulls for each in of_round])
        grant_ms = statistics.median(grants) * 1e3
        report(options, name, tokens, num_bytes, seconds, first_ms=first_ms, grant_ms=grant_ms)
        half = as_words(reader.kv_pool)[: num_blocks // 2]
        other = as_words(reader.kv_pool)[num_blocks // 2 :][: len(half)]
        copy = median_seconds(functools.partial(timed, functools.partial(half.copy_, other), device), options.rounds)
        report(options, "copy", tokens // 2, half.nbytes, copy)
    reader.close()


def measure_host_tier(options: argparse.Namespace, geometry: PoolGeometry) -> None:
    """Measure swapping: GB/s of the whole copy, and how long the step stream waits for it."""
    device = torch.device(options.device)
    pool = torch.randn(geometry.num_blocks, geometry.block_bytes // 4, device=device)
    host = torch.zeros(geometry.num_blocks, geometry.block_bytes, dtype=torch.uint8)
    copies = HostCopies(pool, host)
    for tokens in options.tokens:
        blocks = torch.randperm(geometry.num_blocks)[: tokens // options.block_size].tolist()
        out = [(BlockId(block), HostSlot(slot)) for slot, block in enumerate(blocks)]
        back = [(HostSlot(slot), BlockId(block)) for slot, block in enumerate(blocks)]
        num_bytes = len(blocks) * geometry.block_bytes
        for name, swap in (
            ("swap out", functools.partial(copies.out, out)), ("swap in", functools.partial(copies.into, back)),
        ):  # fmt: skip
            stalls: list[float] = []
            seconds = median_seconds(functools.partial(time_swap, swap, device, stalls), options.rounds)
            report(options, name, tokens, num_bytes, seconds, step_stream_ms=statistics.median(stalls))


def time_swap(swap: Callable[[], Callable[[], None]], device: torch.device, stalls: list[float]) -> float:
    """Return the seconds until the copies are done. stalls: gets the milliseconds that the step stream waits."""
    event: Any = torch.cuda.Event  # it has no annotations
    first, last = event(enable_timing=True), event(enable_timing=True)
    torch.cuda.synchronize(device)
    began = time.perf_counter()
    first.record()
    wait = swap()
    last.record()
    wait()
    torch.cuda.synchronize(device)
    stalls.append(first.elapsed_time(last))
    return time.perf_counter() - began


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="qwen2.5-7b", choices=sorted(SHAPES))
    parser.add_argument("--block-size", type=int, default=16)
    parser.add_argument("--tokens", type=int_list, default=[1024, 4096])
    parser.add_argument("--transports", default="", help="default: all that there are")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--device", default="cuda:0" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--owner-device", default="", help="default: as --device")
    parser.add_argument("--piece-mb", type=float, default=nccl_pool.PIECE_BYTES / 2**20, help="of nccl's messages")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--serve", default="", help=argparse.SUPPRESS)  # for the owner's process: its folder
    return parser.parse_args()


def transports_of(options: argparse.Namespace) -> list[str]:
    if options.transports:
        return list(options.transports.split(","))
    on_gpus = [] if options.device == "cpu" else ["cuda_ipc"]
    if on_gpus and options.owner_device not in ("", options.device):
        on_gpus.append("nccl")
    return [*on_gpus, "shm", "tcp"]


@contextlib.contextmanager
def owner_process(folder: str) -> Iterator[Ask]:
    """Yield a function from numbers of blocks to leases, served by a process with this one's arguments."""
    argv = [sys.executable, "-m", "benchmarks.kv_transfer", *sys.argv[1:], f"--serve={folder}"]
    root = Path(__file__).resolve().parents[1]
    env = os.environ | {"NCCL_DEBUG_FILE": "/dev/stderr"}  # otherwise it would write between the answers
    owner = subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=root, env=env)
    stdin, stdout = owner.stdin, owner.stdout
    assert stdin is not None
    assert stdout is not None

    def ask(count: int) -> tuple[PeerLease, float]:
        stdin.write(f"{count}\n")
        stdin.flush()
        handle, seconds = stdout.readline().split()
        return open_handle(pb.KvHandle.FromString(bytes.fromhex(handle))), float(seconds)

    try:
        if stdout.readline() != "ready\n":
            sys.exit("the owner's process did not start")
        yield ask
    finally:
        owner.kill()
        owner.communicate()


def main() -> None:
    options = parse()
    nccl_pool.PIECE_BYTES = int(options.piece_mb * 2**20)
    layout = full_attention(*SHAPES[options.shape], "bfloat16")
    num_blocks = NUM_LEASES * (max(options.tokens) // options.block_size)
    geometry = PoolGeometry(layout, num_blocks, options.block_size, "benchmark")
    if options.serve:
        device = torch.device(options.owner_device or options.device)
        transport = "nixl" if "nixl" in options.transports else "auto"  # NIXL must be asked for
        asyncio.run(serve_owner(geometry, device, options.serve, transport))
        return
    with tempfile.TemporaryDirectory(prefix="mini-infer-kv-") as folder, owner_process(folder) as ask:
        for name in transports_of(options):
            measure_transport(options, geometry, folder, name, ask)
    if options.device != "cpu":
        measure_host_tier(options, geometry)


if __name__ == "__main__":
    main()
