"""Copies KV blocks and computes their digests, alone or in the same pass, on a GPU.

Formulas are in `kernels/kv_copies/kv_copy.py`. The source may be memory of another process or GPU: it is read once.
A program reuses the weights of its words for several blocks. Digests are sums of integers, so the order of programs
does not matter.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.gpu.launch import FastLaunch
from kernels.kv_copies.kv_copy import WordCopy

WORDS = 1024  # 64-bit words that a program moves at a time
BLOCKS = 4  # blocks per program, so that weights cost half a load; measured best with 1024 words, 8 warps
NUM_WARPS = 8


# One variant for all numbers of blocks, and for parts of lists: NCCL's pieces must not wait for compilation.
@FastLaunch
@triton.jit(
    do_not_specialize=["num_ids"],
    do_not_specialize_on_alignment=["source_ids_ptr", "target_ids_ptr", "digests_ptr"],
)
def _kv_copy_kernel(
    source_ptr, source_ids_ptr, target_ptr, target_ids_ptr, weights_ptr, digests_ptr, num_ids, num_words,
    target_words, height, width, source_offset, source_pitch, target_offset, target_pitch,
    WORDS: tl.constexpr, BLOCKS: tl.constexpr, DIGESTS: tl.constexpr, IS_PART: tl.constexpr,
):  # fmt: skip
    words = tl.program_id(0) * WORDS + tl.arange(0, WORDS)
    inside = words < num_words
    if DIGESTS:
        a = tl.load(weights_ptr + words, mask=inside, other=0)
        b = tl.load(weights_ptr + num_words + words, mask=inside, other=0)
    places, chosen = words, inside
    if IS_PART:  # the rest is only read for its digest
        row = (words - source_offset) // source_pitch
        column = words - source_offset - row * source_pitch
        places = row * target_pitch + target_offset + column
        chosen = inside & (words >= source_offset) & (row < height) & (column < width)
    first = tl.program_id(1) * BLOCKS
    for index in range(first, min(first + BLOCKS, num_ids)):
        source = tl.load(source_ids_ptr + index).to(tl.int64)
        x = tl.load(source_ptr + source * num_words + words, mask=inside, other=0)
        target = tl.load(target_ids_ptr + index).to(tl.int64)
        tl.store(target_ptr + target * target_words + places, x, mask=chosen)
        if DIGESTS:
            tl.atomic_add(digests_ptr + index, tl.sum(a * x + b * (x >> 32)), sem="relaxed")


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


def copy_blocks(
    source: Tensor, source_ids: Tensor, target: Tensor, target_ids: Tensor, weights: Tensor | None = None,
    copy: WordCopy | None = None, digests: Tensor | None = None,
) -> Tensor | None:  # fmt: skip
    """Copy blocks. source, target: int64 (num_blocks, num_words), contiguous; ids: int32 or int64 on the target's
    device.

    weights: int64 (2, words of a source block), for digests int64 (num_ids,) of the source blocks, added to `digests`
    if they are given.
    """
    if not (source.is_contiguous() and target.is_contiguous()):
        raise ValueError("source and target must be contiguous")
    lengths = source.shape[1], target.shape[1]
    if copy is None and lengths[0] != lengths[1]:
        raise ValueError("source and target must be rows of the same length")
    if copy is not None and not copy.fits(*lengths):
        raise ValueError(f"blocks of {lengths} words do not fit {copy}")
    if weights is not None and digests is None:
        digests = torch.zeros(source_ids.shape[0], dtype=torch.int64, device=source_ids.device)
    num_ids, num_words = source_ids.shape[0], source.shape[1]
    if not num_ids:
        return digests
    part = copy or WordCopy(1, num_words, 0, num_words, 0, num_words)
    none = source  # placeholder for tensors that a variant of the kernel does not read
    _kv_copy_kernel[triton.cdiv(num_words, WORDS), triton.cdiv(num_ids, BLOCKS)](
        source, source_ids, target, target_ids, none if weights is None else weights,
        none if digests is None else digests, num_ids, num_words, target.shape[1], part.height, part.width,
        part.source_offset, part.source_pitch, part.target_offset, part.target_pitch,
        WORDS=WORDS, BLOCKS=BLOCKS, DIGESTS=weights is not None, IS_PART=copy is not None, num_warps=NUM_WARPS,
    )  # fmt: skip
    return digests


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
