"""Steps of decode rows as CUDA graphs, one per number of rows.

A graph reads fixed tensors: packed inputs, block tables and last tokens. All graphs share one memory pool and are
captured largest first, so that the smaller ones fit into what the largest took.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

import torch

from engine.start_progress import OnProgress

logger = logging.getLogger(__name__)
Output = TypeVar("Output")


class DecodeGraphs(Generic[Output]):
    """Captured on first construction; `replay` runs a bucket."""

    def __init__(self, run: Callable[[int], Output], buckets: Sequence[int], on_progress: OnProgress) -> None:
        """run: a step of a number of rows, whose inputs say that nothing is stored."""
        began = time.monotonic()
        self._graphs: dict[int, tuple[torch.cuda.CUDAGraph, Output]] = {}
        pool = torch.cuda.graph_pool_handle()
        for num_rows in sorted(buckets, reverse=True):
            run(num_rows)  # compiles kernels, chooses algorithms
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=pool):
                output = run(num_rows)
            self._graphs[num_rows] = (graph, output)
            on_progress("capturing decode graphs", len(self._graphs) / len(buckets))
        logger.info("captured %d decode graphs in %.1f s", len(self._graphs), time.monotonic() - began)

    def replay(self, num_rows: int) -> Output:
        graph, output = self._graphs[num_rows]
        graph.replay()
        return output
