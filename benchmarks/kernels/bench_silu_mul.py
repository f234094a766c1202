"""silu_mul: bandwidth against a copy, and time against eager torch."""

from __future__ import annotations

import functools

import torch
from torch import Tensor
from torch.nn import functional

from benchmarks.kernels.timing import copy_bandwidth, num_input_sets, report_against_copy
from kernels.gpu.elementwise import silu_mul as gpu


def eager_silu_mul(gate_up: Tensor) -> Tensor:
    gate, up = gate_up.chunk(2, dim=-1)
    return functional.silu(gate) * up


def main() -> None:
    copy = copy_bandwidth()
    for n in (3072, 18944):
        for rows in (1, 64, 256, 8192):
            sets = [
                torch.randn(rows, 2 * n, device="cuda").bfloat16() for _ in range(num_input_sets(6 * rows * n, 32))
            ]
            ours = [functools.partial(gpu.silu_mul, s) for s in sets]
            eager = [functools.partial(eager_silu_mul, s) for s in sets]
            report_against_copy("silu_mul", f"{rows}x{n}", ours, eager, 6 * rows * n, copy)


if __name__ == "__main__":
    main()
