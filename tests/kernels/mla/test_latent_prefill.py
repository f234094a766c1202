from __future__ import annotations

import pytest
import torch

from kernels.elementwise import rms_norm, rotate_
from kernels.gpu.attention.prompt_tiles import prefill_tiles
from kernels.gpu.mla.latent_prefill import TILE_M, heads_of_tile, latent_prefill
from kernels.gpu.mla.latent_rope import rotate_and_write_latents
from kernels.gpu.tuning import PrefillConfig
from kernels.paged_attention import attend_causally
from tests.kernels.helpers import BFLOAT16_BOUND, HALF_DTYPE, block_tables_for, relative_error

LAYER, RANK, ROTATED = 1, 32, 16
WIDTH = RANK + ROTATED
SCALE = 0.11


@pytest.mark.parametrize(("num_heads", "dtype"), [(4, torch.float32), (16, HALF_DTYPE), (72, HALF_DTYPE)])
def test_chunks_equal_the_reference(num_heads: int, dtype: torch.dtype, device: torch.device) -> None:
    """A whole prompt, a chunk after cached tokens, one token; outputs of tokens without a tile do not change."""
    seq_lens, block_size = [33, 70, 9], 16
    tables, table = block_tables_for(seq_lens, block_size, device)
    pool = torch.full((sum(map(len, tables)), 2, 1, 1, block_size, WIDTH), float("nan"), device=device).to(dtype)
    starts = [0, 33, 53, 54]  # 33, 20 and 1 queries
    q = torch.randn(55, num_heads, WIDTH, device=device).to(dtype)
    out = torch.full((55, num_heads * RANK), 7.0, device=device).to(dtype)
    expected = []
    for row, (ids, seq_len) in enumerate(zip(tables, seq_lens, strict=True)):
        keys = torch.randn(seq_len, WIDTH, device=device).to(dtype)
        for token in range(seq_len):
            pool[ids[token // block_size], LAYER, 0, 0, token % block_size] = keys[token]
        mine = q[starts[row] : starts[row + 1]].double() * SCALE * WIDTH**0.5  # it divides by the root of the width
        wide = keys.double()[None]
        expected.append(attend_causally(mine, wide, wide[..., :RANK]).flatten(1))
    tiles = prefill_tiles(starts, seq_lens, heads_of_tile(num_heads), TILE_M)
    tiles.append((0, 0, 0, 0))  # padding
    work = torch.tensor(tiles, dtype=torch.int32, device=device)
    latent_prefill(q, pool, RANK, SCALE, LAYER, table, work, out, PrefillConfig(16, 4, 1))
    assert relative_error(out[:54], torch.cat(expected)) < (1e-5 if dtype == torch.float32 else BFLOAT16_BOUND)
    assert out[54].tolist() == [7.0] * (num_heads * RANK)


@pytest.mark.parametrize("dtype", [torch.float32, HALF_DTYPE])
def test_tokens_are_rotated_normed_and_stored(dtype: torch.dtype, device: torch.device) -> None:
    num_tokens, num_heads, plain, block_size = 5, 3, 16, 4
    y = torch.randn(num_tokens, num_heads * (plain + ROTATED) + WIDTH, device=device).to(dtype)
    q = y[:, :-WIDTH].view(num_tokens, num_heads, -1)
    latents, norm = y[:, -WIDTH:], torch.rand(RANK, device=device).to(dtype)
    angles = torch.rand(9, ROTATED // 2, device=device)
    cos, sin = angles.cos(), angles.sin()
    table = torch.stack([torch.cat([cos, cos], -1), torch.cat([-sin, sin], -1)], dim=1).to(dtype)
    positions = torch.tensor([3, 0, 8, 8, 1], device=device, dtype=torch.int32)
    slots = torch.tensor([9, 0, 5, -1, 11], device=device, dtype=torch.int32)
    out = torch.zeros(num_tokens, num_heads, WIDTH, device=device).to(dtype)
    pool = torch.zeros(3, 2, 1, 1, block_size, WIDTH, device=device).to(dtype)
    rotate_and_write_latents(q, latents, norm, 1e-6, table, positions, slots, out, pool, LAYER)
    rows = table[positions.long()].double()
    rotated, keys = q[..., plain:].double(), latents[:, None, RANK:].double()
    rotate_(rotated, rows[:, :1], rows[:, 1:])
    rotate_(keys, rows[:, :1], rows[:, 1:])
    bound = 1e-6 if dtype == torch.float32 else BFLOAT16_BOUND
    assert relative_error(out[..., RANK:], rotated) < bound
    assert not out[..., :RANK].any()
    stored = torch.cat([rms_norm(latents[:, :RANK].float(), norm.float(), 1e-6), keys[:, 0]], dim=1)
    by_slot = pool[:, LAYER, 0, 0].flatten(0, 1)
    kept = [0, 1, 2, 4]
    assert relative_error(by_slot[slots[kept].long()], stored[kept]) < bound
    assert pool[:, 0].count_nonzero() == 0
    assert by_slot.any(dim=1).sum() == len(kept)
