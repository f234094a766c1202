"""One rank's share of an embedding: rows of its part of the vocabulary, zeros for other tokens."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.gpu.elementwise.rms_norm import num_warps_for
from kernels.gpu.launch import overlaps_launches, wait_for_predecessor


@triton.jit
def _vocab_parallel_embed_kernel(
    token_ids_ptr, embedding_ptr, residual_ptr, out_ptr, first, count, n, BLOCK: tl.constexpr, OVERLAPS: tl.constexpr
):
    wait_for_predecessor(OVERLAPS)
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    inside = columns < n
    token_id = tl.load(token_ids_ptr + row).to(tl.int64) - first
    is_mine = (token_id >= 0) & (token_id < count)
    value = tl.load(embedding_ptr + token_id * n + columns, mask=inside & is_mine, other=0.0)
    tl.store(out_ptr + row * n + columns, value, mask=inside)
    tl.store(residual_ptr + row * n + columns, tl.zeros_like(value), mask=inside)


def vocab_parallel_embed(token_ids: Tensor, embedding: Tensor, first: int) -> tuple[Tensor, Tensor]:
    """Look up token_ids (num_rows,) in embedding (count, n), from token `first` on: zeros, share (num_rows, n)."""
    num_rows, (count, n) = token_ids.shape[0], embedding.shape
    residual, out = (torch.empty(num_rows, n, dtype=embedding.dtype, device=embedding.device) for _ in range(2))
    overlaps = overlaps_launches(embedding)
    _vocab_parallel_embed_kernel[(num_rows,)](
        token_ids, embedding, residual, out, first, count, n, BLOCK=triton.next_power_of_2(n), OVERLAPS=overlaps,
        num_warps=num_warps_for(n), launch_pdl=overlaps,
    )  # fmt: skip
    return residual, out
