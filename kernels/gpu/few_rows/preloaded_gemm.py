"""Skinny GEMM whose weights are in shared memory before the previous kernel has ended: y = x W^T + b.

A program's tile of W fits into shared memory and does not depend on the step, so TMA loads it while the previous
kernel still runs (see `launch`); only x, some ten KB in the L2 cache, is read after the wait. Instead of loops over K
there are programs along K: each leaves split-K partials, rounded like an output, and the next kernel (`rms_norm`,
`silu_mul`, `rope`) adds them in order. Results do not depend on timing, nor a row on other rows.

It pays off if all programs of a launch fit on the GPU at once, so for small weights: `few_row_tuning.py`.

Reference: `functional.linear`.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from kernels.gpu.few_rows.gemm_configs import PreloadedConfig
from kernels.gpu.launch import let_successor_start, overlaps_launches, wait_first

MAX_ROWS = 64
COLUMN_MULTIPLE = 8  # of the weight, for aligned rows
SHARED_BYTES = 196_608  # 64 x 1024 of W and 32 x 1024 of x
BLOCK_N = 64  # rows of W in a tile: the smallest M of wgmma


def fits_preloaded(device: torch.device) -> bool:
    """Whether a multiprocessor has the shared memory that the configurations need."""
    if device.type != "cuda":
        return True
    index = torch.cuda.current_device() if device.index is None else device.index
    return bool(triton.runtime.driver.active.utils.get_device_properties(index)["max_shared_mem"] >= SHARED_BYTES)


@triton.jit(do_not_specialize=["M"])
def _preloaded_kernel(
    x_ptr, weight_desc, bias_ptr, out_ptr, M, N, K, x_stride,
    HAS_BIAS: tl.constexpr, EVEN: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, CHUNK: tl.constexpr,
    NUM_CHUNKS: tl.constexpr, DEPTH: tl.constexpr, OVERLAPS: tl.constexpr,
):  # fmt: skip
    let_successor_start(OVERLAPS)
    first_column = tl.program_id(0) * BLOCK_N
    split = tl.program_id(1)
    first = split * (CHUNK * NUM_CHUNKS)
    weights = ()  # zeros beyond the weight's end
    for i in tl.static_range(NUM_CHUNKS):
        tile = weight_desc.load([first_column, first + i * CHUNK])
        weights = weights + (tile,)  # type: ignore[assignment]  # noqa: RUF005  Triton's tuples unpack nothing
    wait_first(OVERLAPS)

    rows = tl.arange(0, BLOCK_M)
    has_row = (rows < M)[:, None]
    ks = first + tl.arange(0, CHUNK)
    x_rows = x_ptr + rows[:, None] * x_stride + ks[None, :]
    xs = ()
    for i in tl.static_range(DEPTH):
        exists = has_row if EVEN else has_row & (ks + i * CHUNK < K)[None, :]
        xs = xs + (tl.load(x_rows + i * CHUNK, mask=exists, other=0.0),)  # type: ignore[assignment]  # noqa: RUF005
    total = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    for i in tl.static_range(NUM_CHUNKS):
        total = tl.dot(weights[i], tl.trans(xs[i]), total, input_precision="ieee")
        if i + DEPTH < NUM_CHUNKS:  # only now, so that it can reuse the memory of the previous chunk
            exists = has_row if EVEN else has_row & (ks + (i + DEPTH) * CHUNK < K)[None, :]
            more = tl.load(x_rows + (i + DEPTH) * CHUNK, mask=exists, other=0.0)
            xs = xs + (more,)  # type: ignore[assignment]  # noqa: RUF005

    columns = first_column + tl.arange(0, BLOCK_N)
    if HAS_BIAS:  # noqa: SIM102  this is known to the compiler
        if split == 0:
            total += tl.load(bias_ptr + columns, mask=columns < N, other=0.0).to(tl.float32)[:, None]
    offsets = (split * M + rows)[None, :] * N + columns[:, None]
    exists = (rows < M)[None, :] & (columns < N)[:, None]
    tl.store(out_ptr + offsets, total.to(out_ptr.dtype.element_ty), mask=exists)


def preloaded_linear(x: Tensor, weight: Tensor, bias: Tensor | None, config: PreloadedConfig) -> Tensor:
    """Multiply x (rows <= 64, in), columns of stride 1, by weight (out, in), contiguous, in a multiple of 8.

    bias: (out,) or None. The weight is read before the previous kernel has ended, so nothing in a step may write it.
    Returns split-K partials (num_splits, rows, out) in x's dtype.
    """
    num_rows, k = x.shape
    n = weight.shape[0]
    if num_rows > MAX_ROWS:
        raise ValueError(f"{num_rows} rows are too many")
    if not weight.is_contiguous() or weight.shape[1] != k or k % COLUMN_MULTIPLE:
        raise ValueError(f"a contiguous weight of {k} columns, a multiple of {COLUMN_MULTIPLE}, is needed")
    chunk = min(config.chunk, triton.next_power_of_2(k))
    num_splits = triton.cdiv(k, chunk * config.num_chunks)
    out = torch.empty(num_splits, num_rows, n, dtype=x.dtype, device=x.device)
    overlaps = overlaps_launches(x)
    _preloaded_kernel[(triton.cdiv(n, BLOCK_N), num_splits)](
        x, TensorDescriptor(weight, [n, k], [k, 1], [BLOCK_N, chunk]), bias if bias is not None else x, out,
        num_rows, n, k, x.stride(0),
        HAS_BIAS=bias is not None, EVEN=k % (chunk * config.num_chunks) == 0,
        BLOCK_M=max(16, triton.next_power_of_2(num_rows)), BLOCK_N=BLOCK_N, CHUNK=chunk,
        NUM_CHUNKS=config.num_chunks, DEPTH=config.depth, OVERLAPS=overlaps, num_warps=4, launch_pdl=overlaps,
    )  # fmt: skip
    return out
