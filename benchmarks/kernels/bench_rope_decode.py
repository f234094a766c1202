"""rope_decode: attention between its two GEMMs, against rotation and KV write in a kernel of their own.

The GEMMs are part of each call, as in a step: what runs before decides where programs of attention find room
(decision 0087), and a launch less shows in what follows.
"""

from __future__ import annotations

import argparse
import functools
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from benchmarks.kernels.timing import graph_seconds, num_input_sets, report
from engine.gpu.ops.plain import Gemm, gemm
from engine.layers.linear import Linear
from kernels.gpu.kv_splits import DecodeWorkspace
from kernels.gpu.paged_decode import paged_decode
from kernels.gpu.rope import rope_and_write_kv
from kernels.gpu.rope_decode import rope_and_decode
from kernels.gpu.split_k import SplitKWorkspace

EPS, BLOCK_SIZE = 1e-6, 64
KV_DTYPES = {"bfloat16": torch.bfloat16, "fp8": torch.float8_e4m3fn}


@dataclass(frozen=True)
class Shape:
    num_heads: int
    num_kv_heads: int
    head_dim: int
    hidden: int
    has_norm: bool


MODELS = {
    "qwen2.5-7b": Shape(28, 4, 128, 3584, False), "qwen3-0.6b": Shape(16, 8, 128, 1024, True),
    "qwen3-30b-a3b": Shape(32, 4, 128, 2048, True),
}  # fmt: skip


class Case:
    """Random layers over one pool, each with weights of its own: the rotating input sets."""

    def __init__(self, shape: Shape, rows: int, length: int, kv_dtype: torch.dtype, device: torch.device) -> None:
        heads, kv_heads, head_dim, hidden = shape.num_heads, shape.num_kv_heads, shape.head_dim, shape.hidden
        num_all_heads = heads + 2 * kv_heads

        def drawn(*size: int, scale: float = 1.0) -> Tensor:
            return (torch.randn(size, device=device) * scale).bfloat16()

        num_weights = (num_all_heads + heads) * head_dim * hidden
        kv_bytes = 2 * rows * length * kv_heads * head_dim * kv_dtype.itemsize
        self.num_layers = num_input_sets(2 * num_weights + kv_bytes, 48)
        blocks = rows * -(-length // BLOCK_SIZE)
        self.pool = torch.empty(
            blocks, self.num_layers, 2, kv_heads, BLOCK_SIZE, head_dim, dtype=torch.bfloat16, device=device
        ).normal_().to(kv_dtype)  # fmt: skip
        self.tables = torch.randperm(blocks, device=device).view(rows, -1).int()
        self.lengths = torch.full((rows,), length, dtype=torch.int32, device=device)
        self.positions = self.lengths - 1
        self.slots = self.tables[:, -1] * BLOCK_SIZE + self.positions % BLOCK_SIZE
        self.angles, self.x = drawn(length, 2, head_dim), drawn(rows, hidden)
        self.norm = drawn(heads + kv_heads, head_dim) if shape.has_norm else None
        self.workspace = DecodeWorkspace(rows, heads, kv_heads, head_dim, device)
        self.num_heads, self.head_dim = heads, head_dim
        split_k = SplitKWorkspace(device)

        def layer(*size: int) -> Gemm:
            return gemm(Linear(drawn(*size, scale=size[1] ** -0.5)), rows, split_k)

        self.qkv = [layer(num_all_heads * head_dim, hidden) for _ in range(self.num_layers)]
        self.output = [layer(hidden, heads * head_dim) for _ in range(self.num_layers)]

    def apart(self, qkv: Tensor, layer: int) -> Tensor:
        rope_and_write_kv(qkv, self.angles, self.positions, self.slots, self.norm, EPS, self.pool, layer)
        q = qkv[:, : self.num_heads]
        return paged_decode(q, self.pool, layer, self.tables, self.lengths, self.workspace)

    def within(self, qkv: Tensor, layer: int) -> Tensor:
        return rope_and_decode(
            qkv, self.angles, self.slots, self.norm, EPS, self.pool, layer, self.tables, self.lengths, self.workspace
        )  # fmt: skip

    def run(self, attend: Callable[[Tensor, int], Tensor], layer: int) -> Tensor:
        qkv = self.qkv[layer](self.x).view(self.x.shape[0], -1, self.head_dim)
        return self.output[layer](attend(qkv, layer))

    def seconds(self, attend: Callable[[Tensor, int], Tensor]) -> float:
        return graph_seconds([functools.partial(self.run, attend, layer) for layer in range(self.num_layers)])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", choices=MODELS, help="one of the models; default: all")
    parser.add_argument("--kv-dtype", choices=KV_DTYPES, default="bfloat16")
    parser.add_argument("--length", type=int, default=1024, help="tokens of each row")
    parser.add_argument("--rows", default="1,4,8")
    options = parser.parse_args()
    for model in [options.model] if options.model else list(MODELS):
        for rows in map(int, options.rows.split(",")):
            kv_dtype = KV_DTYPES[options.kv_dtype]
            case = Case(MODELS[model], rows, options.length, kv_dtype, torch.device("cuda"))
            is_same = torch.equal(case.run(case.apart, 0), case.run(case.within, 0))
            report(
                "rope_decode", f"{model} {options.kv_dtype} {rows}x{options.length}",
                apart_us=case.seconds(case.apart) * 1e6, us=case.seconds(case.within) * 1e6,
                bits="same" if is_same else "others",
            )  # fmt: skip


if __name__ == "__main__":
    main()
