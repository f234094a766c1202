"""Digests of KV blocks on a GPU; the formula is in `kernels/kv_digest.py`.

A program uses the weights of its words for several blocks. Digests are sums of integers, so the order of programs
does not matter.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.gpu.launch import FastLaunch

WORDS = 1024  # 64-bit words a program reads at a time
BLOCKS = 4  # blocks per program, so that weights cost half a load; the fastest with 1024 words and 8 warps
NUM_WARPS = 8


# One variant for all numbers of blocks, and for slices of lists.
@FastLaunch
@triton.jit(do_not_specialize=["num_ids"], do_not_specialize_on_alignment=["ids_ptr", "digests_ptr"])
def _kv_digest_kernel(
    blocks_ptr, ids_ptr, weights_ptr, digests_ptr, num_ids, num_words, WORDS: tl.constexpr, BLOCKS: tl.constexpr
):
    words = tl.program_id(0) * WORDS + tl.arange(0, WORDS)
    inside = words < num_words
    a = tl.load(weights_ptr + words, mask=inside, other=0)
    b = tl.load(weights_ptr + num_words + words, mask=inside, other=0)
    first = tl.program_id(1) * BLOCKS
    for index in range(first, min(first + BLOCKS, num_ids)):
        block = tl.load(ids_ptr + index).to(tl.int64)
        x = tl.load(blocks_ptr + block * num_words + words, mask=inside, other=0)
        tl.atomic_add(digests_ptr + index, tl.sum(a * x + b * (x >> 32)), sem="relaxed")


def digest_blocks(blocks: Tensor, ids: Tensor, weights: Tensor, digests: Tensor | None = None) -> Tensor:
    """Compute digests of blocks int64 (num_blocks, num_words), contiguous, with weights int64 (2, num_words).

    Returns int64 (num_ids,). With `digests`, the result is added to them.
    """
    num_ids, num_words = ids.shape[0], blocks.shape[1]
    if digests is None:
        digests = torch.zeros(num_ids, dtype=torch.int64, device=ids.device)
    if num_ids:
        _kv_digest_kernel[triton.cdiv(num_words, WORDS), triton.cdiv(num_ids, BLOCKS)](
            blocks, ids, weights, digests, num_ids, num_words, WORDS=WORDS, BLOCKS=BLOCKS, num_warps=NUM_WARPS
        )
    return digests
