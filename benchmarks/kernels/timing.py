"""Timing of GPU work: replays of CUDA graphs over rotating inputs, so that launches and the L2 cache do not distort.

`graph_seconds` takes one call per input set; together the sets should be several times the L2 (60 MB on an H200).
"""

from __future__ import annotations

import json
import multiprocessing
import os
import statistics
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import suppress
from typing import Any, TypeVar

import torch

Config = TypeVar("Config")

ROTATION_BYTES = 400 << 20
WARM_SECONDS = 0.03
RANK_REPLAYS = 12
MAX_COMPILERS = 14  # processes
MIN_CALLS = 32  # starting a graph takes 8 us: 1.2 us per call if it has only seven


def num_input_sets(bytes_per_call: int, most: int = 64) -> int:
    """Return how many input sets to rotate through."""
    return max(2, min(most, -(-ROTATION_BYTES // max(bytes_per_call, 1))))


def graph_seconds(calls: Sequence[Callable[[], object]], replays: int = 7) -> float:
    """Return the median seconds per call, with gaps between kernels, as in a captured step of many layers."""
    calls = list(calls) * -(-MIN_CALLS // len(calls))
    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for call in calls[:2]:
            call()
    torch.cuda.current_stream().wait_stream(stream)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    first = _median_seconds(graph.replay, 2)
    for _ in range(min(int(WARM_SECONDS / first), 1000)):  # the first tens of milliseconds run up to 15% slower
        graph.replay()
    return _median_seconds(graph.replay, replays) / len(calls)


def eager_seconds(calls: Sequence[Callable[[], object]], replays: int = 5) -> float:
    """Return the median seconds per call, launched one by one."""

    def run() -> None:
        for call in calls:
            call()

    run()
    return _median_seconds(run, replays) / len(calls)


def compile_ahead(compile_some: Callable[[Sequence[Config]], object], configs: Sequence[Config]) -> None:
    """Run `compile_some` in several processes, each for a part of the settings: Triton caches kernels on disk."""
    num_workers = min(MAX_COMPILERS, os.cpu_count() or 1)
    with ProcessPoolExecutor(num_workers, multiprocessing.get_context("spawn")) as pool:
        list(pool.map(compile_some, [configs[first::num_workers] for first in range(num_workers)]))


def sweep(configs: Iterable[Config], seconds: Callable[[Config], float]) -> list[tuple[float, Config]]:
    """Time the settings that fit the chip; return the fastest first."""
    from triton.runtime.errors import OutOfResources

    found = []
    for config in configs:
        with suppress(OutOfResources):
            found.append((seconds(config), config))
    return sorted(found, key=lambda each: each[0])


def report_against_copy(
    kernel: str, shape: str, ours: Sequence[Callable[[], object]], eager: Sequence[Callable[[], object]],
    moved: int, copy: float,
) -> None:  # fmt: skip
    """Report a kernel that moves `moved` bytes per call. eager: the same in torch. copy: see `copy_bandwidth`."""
    seconds = graph_seconds(ours)
    rate = moved / seconds
    report(
        kernel, shape, us=seconds * 1e6, gb_per_s=rate / 1e9, of_copy=rate / copy,
        eager_ratio=eager_seconds(eager) / seconds,
    )  # fmt: skip


def _median_seconds(run: Callable[[], object], replays: int) -> float:
    event: Any = torch.cuda.Event  # it has no annotations
    times: list[float] = []
    for _ in range(replays):
        start, stop = event(enable_timing=True), event(enable_timing=True)
        start.record()
        run()
        stop.record()
        stop.synchronize()
        times.append(start.elapsed_time(stop) / 1000)
    return statistics.median(times)


def copy_bandwidth() -> float:
    """Return bytes read plus bytes written per second in a 2 GB copy."""
    source = torch.empty(1 << 30, dtype=torch.bfloat16, device="cuda").normal_()
    target = torch.empty_like(source)
    return 2 * source.nbytes / _best(lambda: target.copy_(source))


def read_bandwidth() -> float:
    """Return bytes read per second in a reduction over 2 GB."""
    source = torch.empty(1 << 30, dtype=torch.bfloat16, device="cuda").normal_().view(torch.int32)
    return source.nbytes / _best(lambda: source.amax())


def _best(run: Callable[[], object]) -> float:
    run()
    return min(_median_seconds(run, 1) for _ in range(10))


def graph_us_of_ranks(call: Callable[[], object], count: int) -> float:
    """Return the median microseconds of one call, with `count` of them in a graph, all with the same inputs.

    Every rank runs it with equally many calls, which `graph_seconds` does not guarantee.
    """
    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    with torch.cuda.stream(stream):
        for _ in range(3):  # compiles, and lets ranks meet
            call()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            for _ in range(count):
                call()
        return _median_seconds(graph.replay, RANK_REPLAYS) / count * 1e6


def report(kernel: str, shape: str, **figures: float | str) -> None:
    """Print one JSON line, with four digits per number."""
    line = {key: float(f"{value:.4g}") if isinstance(value, float) else value for key, value in figures.items()}
    machine = torch.cuda.get_device_name()
    print(json.dumps({"kernel": kernel, "shape": shape, **line, "machine": machine}), flush=True)
