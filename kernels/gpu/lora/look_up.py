"""The part of an embedding's adapters before the GEMM with B, on a GPU: columns of A by token.

    look_up  h[i] = A[s_i][:, token i]                A: (num_slots, 1, max_rank, vocab), s_i: the slot of row i

`expand` of `low_rank.py` then adds B h. One of several ranks has the columns of its part of the vocabulary: other
tokens give zeros, as for the embedding itself.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.gpu.launch import FastLaunch, overlaps_launches, wait_for_predecessor
from kernels.gpu.lora.low_rank import BLOCK_RANKS, SlotWeights
from kernels.gpu.lora.row_tiles import BLOCK_ROWS, RowTiles


@FastLaunch
@triton.jit(do_not_specialize=["first_id"])
def _look_up_kernel(
    token_ids_ptr, a_ptr, ranks_ptr, rows_ptr, slots_ptr, h_ptr, num_tokens, first_id,
    RANK: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_R: tl.constexpr, OVERLAPS: tl.constexpr,
):  # fmt: skip
    tile = tl.program_id(0)
    slot = tl.load(slots_ptr + tile)
    first_rank = tl.program_id(1) * BLOCK_R
    rank = 0
    if slot >= 0:
        rank = tl.load(ranks_ptr + slot)
    wait_for_predecessor(OVERLAPS)
    if first_rank >= rank:
        return
    ranks = first_rank + tl.arange(0, BLOCK_R)
    rows = tl.load(rows_ptr + tile * BLOCK_M + tl.arange(0, BLOCK_M))
    has_row = rows >= 0
    token = tl.load(token_ids_ptr + rows, mask=has_row, other=0).to(tl.int64) - first_id
    is_own = has_row & (token >= 0) & (token < num_tokens)
    a_at = a_ptr + (slot.to(tl.int64) * RANK + ranks)[None, :] * num_tokens + token[:, None]
    a = tl.load(a_at, mask=is_own[:, None] & (ranks < rank)[None, :], other=0.0)
    h_at = h_ptr + rows[:, None] * RANK + ranks[None, :]
    tl.store(h_at, a.to(tl.float32), mask=has_row[:, None] & (ranks < RANK)[None, :])


def look_up(token_ids: Tensor, weights: SlotWeights, tiles: RowTiles, first_id: int = 0) -> Tensor:
    """Return h for `expand`, float32 (1, n, 1, max_rank), of token_ids (n,). Only rows with an adapter are written.

    first_id: the token of A's first column.
    """
    rank, num_tokens = weights.a.shape[2:]
    h = torch.empty(1, token_ids.shape[0], 1, rank, dtype=torch.float32, device=token_ids.device)
    overlaps = overlaps_launches(token_ids)
    _look_up_kernel[(tiles.slots.shape[0], triton.cdiv(rank, BLOCK_RANKS))](
        token_ids, weights.a, weights.ranks, tiles.rows, tiles.slots, h, num_tokens, first_id,
        RANK=rank, BLOCK_M=BLOCK_ROWS, BLOCK_R=BLOCK_RANKS, OVERLAPS=overlaps, num_warps=1, launch_pdl=overlaps,
    )  # fmt: skip
    return h
