"""GEMMs of packed weights of 2 to 6 bits on Hopper, which overlap dequantization with the tensor cores.

    y_mn = sum_k w_nk x_mk + b_n

For up to 128 rows; more rows, and other GPUs, use `packed_gemm.py`.

Kernel: `packed_stream_kernel.py`. Layout and reference: `kernels/quantization/packed_weights.py`.
"""

from __future__ import annotations

import torch
import triton
from torch import Tensor
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from kernels.gpu.few_rows.split_k import SplitKWorkspace
from kernels.gpu.launch import has_wgmma, num_multiprocessors
from kernels.gpu.quantization.packed_parts import check_packed
from kernels.gpu.quantization.packed_stream_kernel import BLOCK_N, BOX, stream_kernel
from kernels.gpu.quantization.quantized_tuning import StreamConfig
from kernels.quantization.packed_weights import PackedWeight

MAX_ROWS = 128  # per tile
MAX_STAGES = 12
LEAST_COLUMNS = 512  # columns of W per program, at least, if programs share a tile
SHARED_BYTES = 232_448  # per multiprocessor
ALIGNMENT = 16  # bytes, of rows of a matrix that TMA loads
OTHER_BYTES = 8192  # of a program, besides its stages


def can_stream(x: Tensor, packed: PackedWeight) -> bool:
    """Whether GPU, number of rows and alignment are supported, and a K step has at least one pair of scales."""
    step, matrices = packed.packing.step, [x, packed.words, *([] if packed.high is None else [packed.high])]
    return (
        has_wgmma(x)
        and x.shape[0] <= MAX_ROWS
        and packed.num_columns % step == 0
        and packed.pair_columns <= step
        and all(each.data_ptr() % ALIGNMENT == each.stride(0) * each.itemsize % ALIGNMENT == 0 for each in matrices)
    )


def packed_stream(
    x: Tensor, packed: PackedWeight, bias: Tensor | None, workspace: SplitKWorkspace, config: StreamConfig
) -> Tensor:
    """Multiply x (rows, in), bfloat16, columns of stride 1 -> (rows, out), if `can_stream`."""
    num_rows, n, packing = x.shape[0], packed.words.shape[0], packed.packing
    block_m = max(16, triton.next_power_of_2(num_rows))
    step, num_tiles = check_packed(packed), triton.cdiv(n, BLOCK_N.value)
    num_steps, num_programs = packed.num_columns // step, config.programs_per_sm * num_multiprocessors(x.device)
    share = share_of(num_tiles, num_steps, num_programs, LEAST_COLUMNS // step)
    grid = (triton.cdiv(num_tiles * num_steps, share),)
    workspace.check(grid[0], BLOCK_N.value * block_m, 2)
    high_bytes = 0 if packed.high is None else packing.words * packed.high.itemsize
    stage_bytes = (2 * packing.chunks * packing.words + high_bytes) * BLOCK_N.value + 2 * packing.step * block_m
    num_stages = min(MAX_STAGES, (SHARED_BYTES // config.programs_per_sm - OTHER_BYTES) // stage_bytes)
    out = torch.empty(num_rows, n, dtype=x.dtype, device=x.device)
    words = _boxes(packed.words, BLOCK_N.value, packing.words)
    stream_kernel[grid](
        _boxes(x, block_m, BOX.value), words,
        words if packed.high is None else _boxes(packed.high, BLOCK_N.value, packing.words),
        packed.pairs.view(torch.int32), x if bias is None else bias, workspace.partials, workspace.counters, out,
        num_rows, n, num_steps, share, BITS=packed.bits, PAIR=packed.pair_columns, STAGES=num_stages,
        HAS_BIAS=bias is not None, num_warps=config.num_warps, maxnreg=config.max_registers, launch_pdl=True,
    )  # fmt: skip
    return out


def share_of(num_tiles: int, num_steps: int, num_programs: int, least: int = 1) -> int:
    """Return the steps per program, of num_steps in each of num_tiles. least: fewest steps, since the partial sums of
    more programs take longer to add. If possible, each tile has equally many programs.
    """
    if num_tiles <= num_programs:
        return max(-(-num_steps // (num_programs // num_tiles)), least)
    return -(-num_tiles * num_steps // num_programs)


def _boxes(matrix: Tensor, rows: int, columns: int) -> TensorDescriptor:
    layout = gl.NVMMASharedLayout(columns * matrix.itemsize, 8 * matrix.itemsize, rank=2)
    return TensorDescriptor.from_tensor(matrix, [rows, columns], layout)
