"""Ranks on which a layer of experts is measured: CPU processes connected by gloo, or GPUs."""

from __future__ import annotations

import argparse
import os
import socket
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import cycle
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from benchmarks.harness import choose_clock
from benchmarks.kernels.timing import graph_us_of_ranks
from engine.expert_balancing.moves import ExpertRearranger, LinearExperts
from engine.expert_balancing.placement import Slots
from engine.expert_parallel.exchange import ExchangeForm, ExpertExchange, MovedBytes
from engine.moe.moe import Moe
from engine.plan import PlacedExperts
from engine.tensor_parallel.followers import READY, receive_fds
from engine.tensor_parallel.group import GlooGroup
from kvstore.layout import Shard

NUM_CALLS = 20  # in a graph
NUM_MOVES = 21  # back and forth, ending with the new placement


@dataclass(frozen=True)
class Measured:
    """out: for this rank's rows. exchange_us: dispatch and combine alone. moved: bytes to other ranks in one call."""

    out: Tensor
    layer_us: float
    exchange_us: float
    moved: MovedBytes


class Ranks(Protocol):
    """The ranks that the layer runs on."""

    def measure(self, block: Moe, x: Tensor, form: ExchangeForm) -> Measured:
        """Return the layer's output for this rank's rows, and its times."""
        ...

    def gather(self, x: Tensor) -> list[Tensor]:
        """Return each rank's tensor."""
        ...

    def move(self, block: Moe, slots: Slots) -> float:
        """Give the layer another placement, as while serving. Return the microseconds it takes."""
        ...


class CpuRanks:
    """Processes on one host, connected by gloo."""

    def __init__(self, shard: Shard, folder: str, seconds: float, options: argparse.Namespace) -> None:
        """seconds: of one measurement. options: see `choose_clock`."""
        torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // shard.size))
        self._clock = choose_clock(options)
        self._group = GlooGroup(shard, Path(folder))
        self._size, self._seconds = shard.size, seconds

    def measure(self, block: Moe, x: Tensor, form: ExchangeForm) -> Measured:
        """See Ranks."""
        exchange = ExpertExchange(self._group, block.rule.num_slots, form)
        counts, (shares, chosen) = [x.shape[0]] * self._size, block.route(x)
        out = exchange.output(block, x, counts)
        moved = replace(exchange.moved)

        def alone() -> None:
            came = exchange.dispatch(x, shares, chosen, counts)
            exchange.combine(came.x, came, x.shape[0])

        times = [self._median_us(lambda: exchange.output(block, x, counts)), self._median_us(alone)]
        return Measured(out, times[0], times[1], moved)

    def gather(self, x: Tensor) -> list[Tensor]:
        """See Ranks."""
        return list(self._group.all_gather(x.flatten()).view(self._size, *x.shape))

    def move(self, block: Moe, slots: Slots) -> float:
        """See Ranks."""
        assert block.slots is not None, "it is to be moved"
        rearranger, placements = (
            ExpertRearranger([LinearExperts(block)], self._group),
            cycle((slots, block.slots.placement)),
        )
        median = self._median_us(lambda: rearranger.place(PlacedExperts(0, next(placements))))
        if block.slots.placement != slots:
            rearranger.place(PlacedExperts(0, slots))
        return median

    def _median_us(self, call: Callable[[], object]) -> float:
        """Return the median; all ranks begin each call together, and make equally many calls."""
        times: list[float] = []
        going = True
        while going:
            self._group.all_reduce(torch.zeros(1))
            began = self._clock()
            call()
            times.append(self._clock() - began)
            enough = float(sum(times) > self._seconds and len(times) > 2)
            going = float(self._group.all_reduce(torch.tensor([enough]))) == 0
        return statistics.median(times) * 1e6


class GpuRanks:
    """Ranks with one GPU each, which map each other's memory; calls are captured in graphs."""

    def __init__(
        self, shard: Shard, folder: str, link: socket.socket, max_tokens: int, hidden: int, top_k: int,
        dtype: torch.dtype,
    ) -> None:  # fmt: skip
        """link: to the process that gives each rank the descriptors of all ranks, see `share_fds`."""
        from engine.tensor_parallel.gpu_group import DeviceGroup  # these need triton
        from kernels.gpu.expert_parallel.exchange_memory import ExchangeLayout, rows_a_rank

        self._device, self._size = torch.device("cuda", shard.rank), shard.size
        torch.cuda.set_device(self._device)
        max_rows = rows_a_rank(max_tokens, shard.size)
        layout = ExchangeLayout(shard.size, max_rows, hidden, top_k, dtype)

        def exchange(fd: int) -> list[int]:
            socket.send_fds(link, [READY], [fd])
            return receive_fds(link, shard.size, "the benchmark")

        store = Path(folder, "nccl")
        group = DeviceGroup(shard, self._device, (hidden, 1), dtype, 1, exchange, store, layout, counts=True)
        assert group.rows is not None, "it was given a layout"
        self._group, self._counting = group, group.rows
        self._memory = replace(group.rows, moved=None)

    def measure(self, block: Moe, x: Tensor, form: ExchangeForm) -> Measured:
        """See Ranks."""
        from engine.expert_parallel.gpu_divided_rows import DispatchedExperts
        from engine.layers.linear import Linear
        from engine.moe.expert_stacks import prepare, stacked_of
        from kernels.gpu.expert_parallel.expert_combine import combine
        from kernels.gpu.expert_parallel.expert_dispatch import dispatch

        prepare(block)
        experts, num_tokens = stacked_of(block), x.shape[0] * self._size
        router = Linear(experts.router)
        counted = DispatchedExperts(block, experts, router, self._counting, form)
        served = DispatchedExperts(block, experts, router, self._memory, form)
        assert self._counting.moved is not None
        self._counting.moved.zero_()
        out = counted.output(x, num_tokens)
        rows = self._counting.moved.tolist()
        shares, chosen = block.route(x)
        shares, chosen = shares.contiguous(), chosen.int().contiguous()
        is_padded, num_held = form is ExchangeForm.PADDED, len(block.rule.held_slots)
        parts = torch.zeros(chosen.shape[1], num_tokens, x.shape[1], dtype=x.dtype, device=x.device)

        def alone() -> None:
            came = dispatch(
                x, shares, chosen, num_tokens, num_held, self._memory, is_padded, form is ExchangeForm.GROUPED
            )
            combine(parts, came, self._memory, is_padded=is_padded)

        layer_us, exchange_us = (
            graph_us_of_ranks(call, NUM_CALLS) for call in (lambda: served.output(x, num_tokens), alone)
        )
        row_bytes = x.shape[1] * x.itemsize
        dispatched = rows[0] * (row_bytes + 8 * block.num_chosen)
        return Measured(out, layer_us, exchange_us, MovedBytes(dispatched, rows[1] * row_bytes))

    def gather(self, x: Tensor) -> list[Tensor]:
        """See Ranks."""
        parts = [torch.empty_like(x) for _ in range(self._size)]
        self._group._nccl.allgather([parts], [x.contiguous()]).wait()
        return parts

    def move(self, block: Moe, slots: Slots) -> float:
        """See Ranks. The time is that of device and host, beginning with an idle device."""
        from engine.expert_balancing.gpu_moves import StackedLayer

        assert block.slots is not None, "it is to be moved"
        rearranger, placements = (
            ExpertRearranger([StackedLayer(block)], self._group),
            cycle((slots, block.slots.placement)),
        )
        times: list[float] = []
        for _ in range(NUM_MOVES):
            self.gather(torch.zeros(1, device=self._device))  # all ranks begin together
            torch.cuda.synchronize(self._device)
            began = time.perf_counter()
            rearranger.place(PlacedExperts(0, next(placements)))
            torch.cuda.synchronize(self._device)
            times.append(time.perf_counter() - began)
        return statistics.median(times) * 1e6


def share_fds(links: list[socket.socket]) -> None:
    """Give every rank the descriptors of all ranks."""
    fds = [fd for rank, link in enumerate(links) for fd in receive_fds(link, 1, f"rank {rank}")]
    for link in links:
        socket.send_fds(link, [READY], fds)
    for fd in fds:
        os.close(fd)
