"""All-reduce with residual and norm, and all-gather of logits, between two GPUs: ours in CUDA graphs, beside NCCL.

    python -m benchmarks.kernels.bench_all_reduce [--rows 1,8,64,256,512] [--widths 3584,8192] [--vocab 152064]

Two processes, one GPU each. Times are medians over replays of a graph that holds 200 of them (20 all-gathers).
"""

from __future__ import annotations

import argparse
import os
import socket
import sys
import tempfile
from functools import partial
from pathlib import Path

import torch
import torch.multiprocessing
from torch import Tensor

from benchmarks.harness import int_list
from benchmarks.kernels.timing import graph_us_of_ranks
from engine.tensor_parallel.gpu_group import DeviceGroup
from kernels.gpu.elementwise.rms_norm import add_rms_norm
from kvstore.layout import Shard

EPS = 1e-5
MAX_GATHERED_ROWS = 256


def by_nccl(group: DeviceGroup, x: Tensor, residual: Tensor, weight: Tensor) -> None:
    group._nccl.allreduce([x]).wait()
    add_rms_norm(x, residual, weight, EPS)


def run_rank(rank: int, link: socket.socket, store: str, options: argparse.Namespace) -> None:
    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)

    def exchange(fd: int) -> list[int]:
        socket.send_fds(link, [b"x"], [fd])
        _, (theirs,), _, _ = socket.recv_fds(link, 1, 1)
        return [os.dup(fd), theirs] if rank == 0 else [theirs, os.dup(fd)]

    part = -(-options.vocab // 2)
    widths = max(options.widths), part
    group = DeviceGroup(Shard(rank, 2), device, widths, torch.bfloat16, MAX_GATHERED_ROWS, exchange, Path(store))
    for n in options.widths:
        weight = torch.ones(n, dtype=torch.bfloat16, device=device)
        for rows in options.rows:
            x, residual = (torch.randn(rows, n, device=device).bfloat16() for _ in range(2))
            ours = graph_us_of_ranks(partial(group.all_reduce_rms_norm, x, residual, weight, EPS), 200)
            theirs = graph_us_of_ranks(partial(by_nccl, group, x, residual, weight), 200)
            if rank == 0:
                print(f"n {n} rows {rows}: ours {ours:.2f} us, NCCL and norm {theirs:.2f}", flush=True)
    for rows in (rows for rows in options.rows if rows <= MAX_GATHERED_ROWS):
        logits = torch.randn(rows, part, device=device).bfloat16()
        found = graph_us_of_ranks(partial(group.all_gather, logits), 20)
        if rank == 0:
            print(f"all-gather of logits, rows {rows}: {found:.1f} us", flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int_list, default=[1, 8, 64, 256, 512])
    parser.add_argument("--widths", type=int_list, default=[3584, 8192])
    parser.add_argument("--vocab", type=int, default=152_064)
    options = parser.parse_args()
    context = torch.multiprocessing.get_context("fork")
    with tempfile.TemporaryDirectory() as folder:
        links = socket.socketpair()
        ranks = [
            context.Process(target=run_rank, args=(rank, link, f"{folder}/store", options))
            for rank, link in enumerate(links)
        ]
        for process in ranks:
            process.start()
        for process in ranks:
            process.join()
    return max(abs(process.exitcode or 0) for process in ranks)


if __name__ == "__main__":
    sys.exit(main())
