"""rms_norm and add_rms_norm: bandwidth against a copy, and time against the eager formula."""

from __future__ import annotations

import argparse
import functools

import torch
from torch import Tensor

from benchmarks.kernels.timing import copy_bandwidth, graph_seconds, num_input_sets, report, report_against_copy
from kernels.gpu.elementwise import rms_norm as gpu


def eager_rms_norm(x: Tensor, weight: Tensor) -> Tensor:
    """Compute the formula as eager torch models do."""
    value = x.float()
    return weight * (value * torch.rsqrt(value.pow(2).mean(-1, keepdim=True) + 1e-6)).to(x.dtype)


def eager_add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor) -> Tensor:
    residual += x
    return eager_rms_norm(residual, weight)


def sweep(copy: float) -> None:
    for n in (1024, 3584, 4096):
        weight = torch.randn(n, device="cuda").bfloat16()
        for rows in (1, 256, 8192, 32768):
            sets = [
                torch.randn(2, rows, n, device="cuda").bfloat16() for _ in range(num_input_sets(8 * rows * n, 32))
            ]
            for num_warps in (1, 2, 4, 8, 16):
                plain = graph_seconds([functools.partial(gpu.rms_norm, s[0], weight, 1e-6, num_warps) for s in sets])
                fused = graph_seconds(
                    [functools.partial(gpu.add_rms_norm, s[0], s[1], weight, 1e-6, num_warps) for s in sets]
                )
                report(
                    "rms_norm sweep", f"{rows}x{n} w{num_warps}", us=plain * 1e6, fused_us=fused * 1e6,
                    of_copy=4 * rows * n / plain / copy, fused_of_copy=8 * rows * n / fused / copy,
                )  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sweep", action="store_true")
    if parser.parse_args().sweep:
        sweep(copy_bandwidth())
        return
    copy = copy_bandwidth()
    for n in (1024, 3584, 4096):
        weight = torch.randn(n, device="cuda").bfloat16()
        for rows in (1, 64, 256, 8192, 32768):
            sets = [
                torch.randn(2, rows, n, device="cuda").bfloat16() for _ in range(num_input_sets(8 * rows * n, 32))
            ]
            for name, moved in (("rms_norm", 4), ("add_rms_norm", 8)):
                if name == "rms_norm":
                    ours = [functools.partial(gpu.rms_norm, s[0], weight, 1e-6) for s in sets]
                    eager = [functools.partial(eager_rms_norm, s[0], weight) for s in sets]
                else:
                    ours = [functools.partial(gpu.add_rms_norm, s[0], s[1], weight, 1e-6) for s in sets]
                    eager = [functools.partial(eager_add_rms_norm, s[0], s[1], weight) for s in sets]
                report_against_copy(name, f"{rows}x{n}", ours, eager, moved * rows * n, copy)


if __name__ == "__main__":
    main()
