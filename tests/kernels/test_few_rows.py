"""One decoder layer around its attention, product by product, against plain torch operations in float32."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from kernels.gpu.few_rows import Residual, add_product, embed, gated, rotated_qkv
from kernels.gpu.rope import rope_reference
from kernels.gpu.small_m_gemm import SmallMConfig, SmallMWorkspace
from kernels.rms_norm import rms_norm
from kernels.silu_mul import silu_mul
from tests.kernels.helpers import BFLOAT16_BOUND, HALF_DTYPE, poisoned_pool, relative_error

EPS = 1e-6
HIDDEN = 72
CONFIGS = [SmallMConfig(16, 32, split_k, 4, 2) for split_k in (1, 3)]


def bound(dtype: torch.dtype) -> float:
    return 5e-6 if dtype == torch.float32 else 2 * BFLOAT16_BOUND


def some_residual(rows: int, norm: Tensor, dtype: torch.dtype, device: torch.device) -> Residual:
    embedding = (torch.randn(11, HIDDEN, device=device) * 3).to(dtype)
    return embed(torch.randint(11, (rows,), device=device), embedding, norm)


def some_norm(dtype: torch.dtype, device: torch.device) -> Tensor:
    return (1 + 0.2 * torch.randn(HIDDEN, device=device)).to(dtype)


def random(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.randn(shape, device=device).to(dtype)


def poisoned_workspace(device: torch.device) -> SmallMWorkspace:
    workspace = SmallMWorkspace(device)
    workspace.partials.fill_(float("nan"))
    return workspace


@pytest.mark.parametrize("config", CONFIGS)
@pytest.mark.parametrize("rows", [1, 5, 33])
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, HALF_DTYPE])
def test_gate_behind_a_norm(
    config: SmallMConfig, rows: int, has_bias: bool, dtype: torch.dtype, device: torch.device
) -> None:
    norm = some_norm(dtype, device)
    residual = some_residual(rows, norm, dtype, device)
    weight = random((2 * 37, HIDDEN), dtype, device)
    bias = random((2 * 37,), dtype, device) if has_bias else None
    workspace = poisoned_workspace(device)
    normed = rms_norm(residual.value.float(), norm.float(), EPS)
    expected = silu_mul(functional.linear(normed, weight.float(), bias.float() if bias is not None else None))
    for _ in range(2):  # the second launch finds the counters as the first left them
        assert relative_error(gated(residual, weight, bias, EPS, workspace, config), expected) < bound(dtype)
        assert not workspace.counters.any()


@pytest.mark.parametrize("config", CONFIGS)
@pytest.mark.parametrize("rows", [1, 5, 33])
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, HALF_DTYPE])
def test_a_product_is_added_and_what_the_next_norm_needs_is_left(
    config: SmallMConfig, rows: int, has_bias: bool, dtype: torch.dtype, device: torch.device
) -> None:
    norm, following = some_norm(dtype, device), some_norm(dtype, device)
    residual = some_residual(rows, norm, dtype, device)
    x, weight = random((rows, 48), dtype, device), random((HIDDEN, 40), dtype, device)
    x = x[:, :40]
    bias = random((HIDDEN,), dtype, device) if has_bias else None
    expected = residual.value.float() + functional.linear(
        x.float(), weight.float(), bias.float() if bias is not None else None
    )
    add_product(x, weight, bias, residual, following, poisoned_workspace(device), config)
    assert relative_error(residual.value, expected) < bound(dtype)
    assert relative_error(residual.scaled, residual.value.float() * following.float()) < bound(dtype)
    parts = residual.squares[: rows * residual.num_parts].view(rows, -1)
    assert relative_error(parts.sum(1), residual.value.float().square().sum(1)) < bound(dtype)


@pytest.mark.parametrize("config", CONFIGS)
@pytest.mark.parametrize("rows", [1, 5, 33])
@pytest.mark.parametrize("head_dim", [16, 64])
@pytest.mark.parametrize("has_norm_and_bias", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, HALF_DTYPE])
def test_qkv_is_rotated_and_stored(
    config: SmallMConfig, rows: int, head_dim: int, has_norm_and_bias: bool, dtype: torch.dtype, device: torch.device
) -> None:
    num_heads, num_kv_heads, layer = 4, 2, 1
    norm = some_norm(dtype, device)
    residual = some_residual(rows, norm, dtype, device)
    weight = random((8 * head_dim, HIDDEN), dtype, device)
    bias = random((8 * head_dim,), dtype, device) if has_norm_and_bias else None
    qk_norm = 1 + 0.2 * torch.randn(6, head_dim, device=device).to(dtype) if has_norm_and_bias else None
    angles = torch.rand(50, head_dim // 2, device=device) * 6
    sines = torch.cat([-angles.sin(), angles.sin()], dim=1)
    table = torch.stack([angles.cos().repeat(1, 2), sines], dim=1).to(dtype)
    positions = torch.randint(50, (rows,), device=device, dtype=torch.int32)
    slots = torch.randperm(40, device=device)[:rows].to(torch.int32)
    pool = poisoned_pool(10, 2, num_kv_heads, 4, head_dim, dtype, device)
    expected_pool = pool.float().clone()
    expected = functional.linear(
        rms_norm(residual.value.float(), norm.float(), EPS), weight.float(),
        bias.float() if bias is not None else None,
    ).view(rows, 8, head_dim)  # fmt: skip
    rope_reference(
        expected, table.float(), positions, slots, qk_norm.float() if qk_norm is not None else None, EPS,
        expected_pool, layer,
    )  # fmt: skip
    slots[0] = -1  # a padding row stores nothing
    q = rotated_qkv(
        residual, weight, bias, EPS, table, positions, slots, qk_norm, pool, layer, poisoned_workspace(device), config
    )
    assert relative_error(q, expected[:, :num_heads]) < bound(dtype)
    blocks, offsets = slots[1:] // 4, slots[1:] % 4
    got, want = pool[blocks, layer, :, :, offsets], expected_pool[blocks, layer, :, :, offsets]
    assert rows == 1 or relative_error(got, want) < bound(dtype)
    assert int((~pool.isnan()).sum()) == (rows - 1) * 2 * num_kv_heads * head_dim


def test_a_row_is_the_same_in_any_company(device: torch.device) -> None:
    norm = some_norm(HALF_DTYPE, device)
    together = some_residual(9, norm, HALF_DTYPE, device)
    weight = random((96, HIDDEN), HALF_DTYPE, device)
    alone = Residual(together.value[3:4], together.scaled[3:4], together.squares[3:4], 1)
    workspace = SmallMWorkspace(device)
    rows = gated(together, weight, None, EPS, workspace, CONFIGS[1])
    assert torch.equal(rows[3:4], gated(alone, weight, None, EPS, workspace, CONFIGS[1]))


def test_what_does_not_fit_is_refused(device: torch.device) -> None:
    norm = some_norm(torch.float32, device)
    residual = some_residual(2, norm, torch.float32, device)
    weight = torch.randn(96, HIDDEN, device=device)
    workspace = SmallMWorkspace(device, num_floats=16)
    with pytest.raises(ValueError, match="too many"):
        gated(some_residual(200, norm, torch.float32, device), weight, None, EPS, workspace, CONFIGS[0])
    with pytest.raises(ValueError, match="too small"):
        gated(residual, weight, None, EPS, workspace, CONFIGS[1])
    with pytest.raises(ValueError, match="contiguous"):
        gated(residual, weight.T, None, EPS, workspace, CONFIGS[0])
    with pytest.raises(ValueError, match="too narrow"):
        narrow = SmallMConfig(4, 32)
        add_product(
            torch.randn(2, 40, device=device), torch.randn(HIDDEN, 40, device=device), None, residual, norm,
            workspace, narrow,
        )  # fmt: skip
