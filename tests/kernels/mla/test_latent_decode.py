from __future__ import annotations

import pytest
import torch

from kernels.gpu.attention.decode_plan import make_plan, num_programs
from kernels.gpu.mla.latent_decode import MAX_HEADS, latent_decode, latent_workspace, plan_latents
from kernels.gpu.tuning import DecodeConfig
from tests.kernels.helpers import BFLOAT16_BOUND, HALF_DTYPE, block_tables_for, relative_error

SMALL = DecodeConfig(16, 4, 2, 2)
LAYER = 1
SCALE = 0.12


def run(
    seq_lens: list[int], num_heads: int, rank: int, rotated: int, block_size: int, dtype: torch.dtype,
    device: torch.device, programs: int | None,
) -> None:  # fmt: skip
    width = rank + rotated
    tables, table = block_tables_for(seq_lens, block_size, device)
    num_blocks = sum(map(len, tables))
    pool = torch.full((num_blocks, 2, 1, 1, block_size, width), float("nan"), device=device).to(dtype)
    q = torch.randn(len(seq_lens), num_heads + 2, width, device=device).to(dtype)[:, :num_heads]
    expected = []
    for row, (ids, seq_len) in enumerate(zip(tables, seq_lens, strict=True)):
        keys = torch.randn(seq_len, width, device=device).to(dtype)
        for token in range(seq_len):
            pool[ids[token // block_size], LAYER, 0, 0, token % block_size] = keys[token]
        if not seq_len:  # padding
            expected.append(torch.zeros(num_heads * rank, dtype=torch.float64, device=device))
            continue
        scores = SCALE * q[row].double() @ keys.double().T
        expected.append((scores.softmax(dim=-1) @ keys[:, :rank].double()).flatten())
    lengths = torch.tensor(seq_lens, dtype=torch.int32, device=device)
    workspace = latent_workspace(len(seq_lens), num_heads, rank, device)
    workspace.outputs = torch.full((4096, rank), float("nan"), device=device)
    workspace.log_sums = torch.full((4096,), float("nan"), device=device)
    plan = make_plan(lengths, SMALL, programs or num_programs(-(-num_heads // MAX_HEADS), device, SMALL))
    out = latent_decode(q, pool, rank, SCALE, LAYER, table, lengths, plan, workspace)
    assert relative_error(out, torch.stack(expected)) < (1e-5 if dtype == torch.float32 else BFLOAT16_BOUND)


@pytest.mark.parametrize("programs", [1, 3, None])
@pytest.mark.parametrize("dtype", [torch.float32, HALF_DTYPE])
def test_equals_the_reference(programs: int | None, dtype: torch.dtype, device: torch.device) -> None:
    run([1, 16, 17, 70], 4, 32, 16, 16, dtype, device, programs)


def test_uneven_rows_and_padding_between_them(device: torch.device) -> None:
    run([300, 0, 5, 0, 17, 90, 1, 33], 4, 32, 16, 16, torch.float32, device, 5)


def test_more_blocks_than_a_program_lists_at_a_time(device: torch.device) -> None:
    run([1100, 3], 2, 16, 16, 16, torch.float32, device, 1)


@pytest.mark.parametrize(("num_heads", "block_size"), [(16, 64), (72, 8)])
def test_heads_fill_a_program_or_several(num_heads: int, block_size: int, device: torch.device) -> None:
    """Blocks larger and smaller than a tile."""
    run([40, 75], num_heads, 32, 16, block_size, HALF_DTYPE, device, 2)


def test_padding_rows_are_zero(device: torch.device) -> None:
    pool = torch.full((2, 2, 1, 1, 16, 48), float("nan"), device=device)
    workspace = latent_workspace(2, 4, 32, device)
    table = torch.zeros(2, 1, dtype=torch.int32, device=device)
    lengths = torch.zeros(2, dtype=torch.int32, device=device)
    q, plan = torch.randn(2, 4, 48, device=device), plan_latents(lengths, 4, 4)
    out = latent_decode(q, pool, 32, SCALE, 0, table, lengths, plan, workspace)
    assert out.tolist() == [[0.0] * 128] * 2


@pytest.mark.parametrize(("rank", "shape"), [(24, (1, 1, 16, 40)), (32, (2, 1, 16, 48)), (32, (1, 1, 16, 40))])
def test_what_does_not_fit_is_refused(rank: int, shape: tuple[int, ...], device: torch.device) -> None:
    pool = torch.zeros(1, 1, *shape, device=device)
    q = torch.zeros(1, 4, 48 if shape[0] == 2 or rank == 32 else 40, device=device)
    none = torch.zeros(1, 1, dtype=torch.int32, device=device)
    with pytest.raises(ValueError, match="latents of"):
        latent_decode(
            q, pool, rank, SCALE, 0, none, none[0], plan_latents(none[0], 4, 4), latent_workspace(1, 4, 32, device)
        )  # fmt: skip
