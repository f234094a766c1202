"""Grouped GEMMs of 4-bit experts on Hopper, which overlap dequantization with the tensor cores.

Other GPUs and layouts use `grouped_gemm`. Kernel: `packed_experts_kernel.py`.
"""

from __future__ import annotations

import torch
import triton
from torch import Tensor
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from kernels.expert_gate import SILU
from kernels.gpu.launch import has_wgmma
from kernels.gpu.moe.expert_formats import columns_of, form_of
from kernels.gpu.moe.expert_pairs import SortedPairs
from kernels.gpu.moe.expert_tuning import PACKED_DOWN, PACKED_GATE_UP, ExpertTile
from kernels.gpu.moe.grouped_gemm import output_of
from kernels.gpu.moe.packed_experts_kernel import PRODUCERS, STEP, TURN, WORDS, box_of, experts_kernel

MAX_STAGES = 8
SHARED_BYTES = 232_448  # per multiprocessor
OTHER_BYTES = 2048  # of a program, besides its stages
REGISTERS = 65_536  # per multiprocessor
ALIGNMENT = 16  # bytes, of rows


def takes_packed(x: Tensor, weight: Tensor, scales: Tensor | None) -> bool:
    """Whether GPU, dtypes and layout are supported."""
    if scales is None:
        return False
    is_aligned = x.data_ptr() % ALIGNMENT == x.stride(0) * x.itemsize % ALIGNMENT == 0
    has_turns = weight.shape[1] % (2 * TURN.value) == 0
    has_chunks = form_of(weight, scales).words == WORDS.value
    return x.dtype == torch.bfloat16 and has_wgmma(x) and is_aligned and has_turns and has_chunks


def tile_of(weight: Tensor, scales: Tensor, is_gated: bool, load: float) -> ExpertTile | None:
    """Return the tile for the mean number of pairs per expert; None if `grouped_gemm` is faster."""
    form, table = form_of(weight, scales), PACKED_GATE_UP if is_gated else PACKED_DOWN
    scale_words = 1 if form.name == "e2m1" else STEP.value // form.group
    return table.find(pairs_per_expert=load, columns=columns_of(weight), scale_words=scale_words)


def packed_experts(
    x: Tensor, weight: Tensor, pairs: SortedPairs, tile: ExpertTile, top_k: int, shares: Tensor | None,
    scales: Tensor, bias: Tensor | None, gate: tuple[float, float] = SILU,
) -> Tensor:  # fmt: skip
    """Compute `grouped_gemm` for arguments that `takes_packed`."""
    form, is_gated = form_of(weight, scales), shares is None
    out, n, k, num_tokens = output_of(x, weight, shares, top_k, form)
    num_experts, num_pairs = weight.shape[0], num_tokens * top_k
    num_tiles = min(num_pairs, triton.cdiv(num_pairs, tile.block_m) + num_experts)  # an expert's last may not be full
    stage_bytes = 2 * (tile.block_m * STEP.value + tile.block_n * WORDS.value)
    num_stages = min(MAX_STAGES, (SHARED_BYTES // tile.programs_per_sm - OTHER_BYTES) // stage_bytes)
    num_threads = 32 * (tile.num_warps + PRODUCERS.value)
    experts_kernel[(triton.cdiv(n, tile.block_n // 2 if is_gated else tile.block_n), num_tiles)](
        x, _boxes(weight, tile.block_n, is_gated), scales.view(torch.int32), x if bias is None else bias,
        pairs.order, pairs.counts, x if shares is None else shares, out, num_tokens, n, k // STEP.value, x.stride(0),
        NUM_EXPERTS=num_experts, FORMAT=form.name, GROUP=form.group, TOP_K=top_k, GATED=is_gated,
        HAS_BIAS=bias is not None, ALPHA=gate[0], LIMIT=gate[1], X_COLUMNS=x.shape[1], BLOCK_M=tile.block_m,
        BLOCK_N=tile.block_n, STAGES=num_stages, num_warps=tile.num_warps,
        maxnreg=REGISTERS // tile.programs_per_sm // num_threads // 8 * 8, launch_pdl=True,
    )  # fmt: skip
    return out


def _boxes(weight: Tensor, rows: int, is_gated: bool) -> TensorDescriptor:
    """Return boxes of `rows` rows of W per step; gated ones alternate TURN rows of W_gate and of W_up."""
    if is_gated:
        num_experts, both, words = weight.shape
        weight = weight.view(num_experts, 2, both // 2 // TURN.value, TURN.value, words).transpose(1, 2)
    box = box_of(rows, is_gated)
    layout = gl.NVMMASharedLayout(2 * WORDS.value, 16, rank=len(box))
    return TensorDescriptor(weight, list(weight.shape), list(weight.stride()), box, layout)
