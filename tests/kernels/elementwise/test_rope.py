from __future__ import annotations

import pytest
import torch
from torch import Tensor

from kernels.elementwise import rms_norm, rotate_
from kernels.gpu.elementwise.rope import rope_and_write_kv
from kernels.gpu.tuning import RopeConfig
from kernels.paged_attention import write_kv
from tests.kernels.helpers import BFLOAT16_BOUND, poisoned_pool, relative_error

HEAD_DIM, NUM_POSITIONS = 32, 50


def rotary_table(dtype: torch.dtype, device: torch.device) -> Tensor:
    angles = torch.rand(NUM_POSITIONS, HEAD_DIM // 2, device=device) * 6
    cos, sin = angles.cos(), angles.sin()
    return torch.stack([torch.cat([cos, cos], -1), torch.cat([-sin, sin], -1)], dim=1).to(dtype)


def rope_reference(
    qkv: Tensor, table: Tensor, positions: Tensor, slots: Tensor, qk_norm: Tensor | None, eps: float,
    pool: Tensor, layer: int,
) -> None:  # fmt: skip
    """Reference with plain torch operations; every slot must be valid."""
    num_kv_heads, block_size = pool.shape[3], pool.shape[4]
    num_qk_heads = qkv.shape[1] - num_kv_heads
    qk = qkv[:, :num_qk_heads]
    if qk_norm is not None:
        qk.copy_(rms_norm(qk, qk_norm, eps))
    rows = table[positions]
    rotate_(qk, rows[:, :1], rows[:, 1:])
    kv = qkv[:, num_qk_heads - num_kv_heads :].unflatten(1, (2, num_kv_heads))
    block_ids = torch.div(slots, block_size, rounding_mode="floor").long()
    write_kv(pool, layer, kv, block_ids, (slots % block_size).long())


@pytest.mark.parametrize("has_norm", [False, True])
@pytest.mark.parametrize(("num_heads", "num_kv_heads"), [(7, 1), (4, 2), (3, 3)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_equals_the_reference(
    has_norm: bool, num_heads: int, num_kv_heads: int, dtype: torch.dtype, device: torch.device
) -> None:
    table = rotary_table(dtype, device)
    qkv = torch.randn(5, num_heads + 2 * num_kv_heads, HEAD_DIM, device=device).to(dtype)
    norm = torch.randn(num_heads + num_kv_heads, HEAD_DIM, device=device).to(dtype) if has_norm else None
    positions = torch.randint(0, NUM_POSITIONS, (5,), device=device)
    slots = torch.randperm(6 * 4, device=device)[:5]
    pool = poisoned_pool(6, 2, num_kv_heads, 4, HEAD_DIM, dtype, device)
    expected_qkv, expected_pool = qkv.clone(), pool.clone()
    rope_reference(expected_qkv, table, positions, slots, norm, 1e-6, expected_pool, 1)
    rope_and_write_kv(qkv, table, positions, slots, norm, 1e-6, pool, 1)
    bound = 1e-6 if dtype == torch.float32 else BFLOAT16_BOUND
    assert relative_error(qkv, expected_qkv) < bound
    written = ~expected_pool.isnan()
    assert torch.equal(written, ~pool.isnan())  # nothing else has changed, in other layers either
    assert relative_error(pool[written], expected_pool[written]) < bound


@pytest.mark.parametrize("spreads_next", [False, True])
def test_partials_are_added_up(spreads_next: bool, device: torch.device) -> None:
    table = rotary_table(torch.float32, device)
    partials = torch.randn(3, 5, 8, HEAD_DIM, device=device)
    norm = torch.randn(6, HEAD_DIM, device=device)
    positions = torch.randint(0, NUM_POSITIONS, (5,), device=device)
    slots = torch.randperm(6 * 4, device=device)[:5]
    pool = torch.zeros(6, 2, 2, 2, 4, HEAD_DIM, device=device)
    expected_qkv, expected = partials.sum(0), pool.clone()
    rope_reference(expected_qkv, table, positions, slots, norm, 1e-6, expected, 1)
    rope_and_write_kv(partials, table, positions, slots, norm, 1e-6, pool, 1, spreads_next=spreads_next)
    assert relative_error(pool, expected) < 1e-6
    assert relative_error(partials[0, :, :6], expected_qkv[:, :6]) < 1e-6


def test_eight_bit_pools_get_rounded_and_bounded_numbers(device: torch.device) -> None:
    table = rotary_table(torch.float32, device)
    qkv = torch.randn(5, 8, HEAD_DIM, device=device) * 3
    qkv[2, 5:] = 1e6
    positions = torch.randint(0, NUM_POSITIONS, (5,), device=device)
    slots = torch.randperm(6 * 4, device=device)[:5]
    shape = (6, 2, 2, 2, 4, HEAD_DIM)
    pool, expected = (torch.zeros(shape, dtype=torch.float8_e4m3fn, device=device) for _ in range(2))
    rope_reference(qkv.clone(), table, positions, slots, None, 1e-6, expected, 1)
    rope_and_write_kv(qkv, table, positions, slots, None, 1e-6, pool, 1)
    got, want = pool.float(), expected.float()
    assert float(want.abs().max()) == float(got.abs().max()) == 448.0
    if torch.cuda.is_available():  # the interpreter loses the carry when it rounds up to a power of two
        assert bool(((got - want).abs() <= want.abs() / 8 + 2**-9).all())  # a step, where sums differ
    assert float((got != want).float().mean()) < 0.01


@pytest.mark.parametrize("config", [RopeConfig(1, 8, 2), RopeConfig(4, 2, 4), RopeConfig(2, 16, 4)])
def test_what_a_program_takes_does_not_matter(config: RopeConfig, device: torch.device) -> None:
    table = rotary_table(torch.float32, device)
    qkv = torch.randn(7, 8, HEAD_DIM, device=device)
    norm = torch.randn(6, HEAD_DIM, device=device)
    positions = torch.randint(0, NUM_POSITIONS, (7,), device=device)
    slots = torch.randperm(6 * 4, device=device)[:7]
    pool = torch.zeros(6, 2, 2, 2, 4, HEAD_DIM, device=device)
    expected_qkv, expected = qkv.clone(), pool.clone()
    rope_reference(expected_qkv, table, positions, slots, norm, 1e-6, expected, 1)
    rope_and_write_kv(qkv, table, positions, slots, norm, 1e-6, pool, 1, config=config)
    assert relative_error(pool, expected) < 1e-6
    assert relative_error(qkv[:, :6], expected_qkv[:, :6]) < 1e-6


def test_padding_stores_nothing(device: torch.device) -> None:
    table = rotary_table(torch.float32, device)
    pool = poisoned_pool(2, 1, 1, 4, HEAD_DIM, torch.float32, device)
    positions = torch.zeros(2, dtype=torch.int64, device=device)
    slots = torch.tensor([-1, 3], dtype=torch.int32, device=device)
    rope_and_write_kv(torch.randn(2, 4, HEAD_DIM, device=device), table, positions, slots, None, 1e-6, pool, 0)
    assert int((~pool.isnan()).sum()) == 2 * HEAD_DIM
    assert not pool[0, 0, :, 0, 3].isnan().any()


def test_a_head_that_is_no_power_of_two_is_refused(device: torch.device) -> None:
    pool = poisoned_pool(2, 1, 1, 4, 48, torch.float32, device)
    index = torch.zeros(1, dtype=torch.int64, device=device)
    qkv, table = torch.randn(1, 4, 48, device=device), torch.ones(1, 2, 48, device=device)
    with pytest.raises(ValueError, match="power of two"):
        rope_and_write_kv(qkv, table, index, index, None, 1e-6, pool, 0)
