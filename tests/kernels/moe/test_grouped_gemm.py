from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from kernels.elementwise import rms_norm, silu_mul
from kernels.gpu.few_rows.gemm_configs import GemvConfig, TileConfig
from kernels.gpu.moe.expert_pairs import sort_pairs
from kernels.gpu.moe.grouped_gemm import grouped_gemm, sum_of_held
from kernels.gpu.moe.grouped_gemv import add_down_of_row, grouped_gemv
from kernels.gpu.quantization.quantize import quantize_rows
from kernels.quantization.quantized_gemm import FP8_DTYPE
from tests.kernels.helpers import BFLOAT16_BOUND, HALF_DTYPE, relative_error

TILES = TileConfig(16, 32, num_stages=2, block_m=16)
TILES_OF_8 = TileConfig(16, 32, num_stages=2, block_m=8)
ROWS = GemvConfig(4, 32, num_warps=1, num_stages=1)
NUM_EXPERTS, TOP_K = 6, 3
ALPHA, LIMIT = 1.702, 2.0


def choices(num_tokens: int, device: torch.device, few_experts: bool = False) -> tuple[Tensor, Tensor]:
    """Choose distinct experts for each token. Returns them and their shares."""
    scores = torch.rand(num_tokens, NUM_EXPERTS, device=device)
    if few_experts:
        scores[:, :TOP_K] += 2.0  # the others get no token
    shares, chosen = scores.softmax(dim=-1).topk(TOP_K, dim=-1)
    return chosen.to(torch.int32).contiguous(), shares.contiguous()


def reference(x: Tensor, gate_up: Tensor, down: Tensor, chosen: Tensor, shares: Tensor) -> Tensor:
    """Compute the outputs of each token's experts times their shares in float64: (top_k, num_tokens, n)."""
    parts = []
    for j in range(TOP_K):
        experts = chosen[:, j].long()
        both = torch.einsum("th,tih->ti", x.double(), gate_up.double()[experts])
        y = torch.einsum("ti,thi->th", silu_mul(both), down.double()[experts])
        parts.append(y * shares[:, j, None].double())
    return torch.stack(parts)


@pytest.mark.parametrize("num_tokens", [1, 400])
@pytest.mark.parametrize("few_experts", [False, True])
def test_pairs_are_sorted_by_expert(num_tokens: int, few_experts: bool, device: torch.device) -> None:
    chosen, _ = choices(num_tokens, device, few_experts)
    pairs = sort_pairs(chosen, NUM_EXPERTS)
    flat = chosen.flatten().cpu()
    assert torch.equal(pairs.counts.cpu(), torch.bincount(flat, minlength=NUM_EXPERTS).to(torch.int32))
    assert torch.equal(pairs.order.cpu().long(), flat.argsort(stable=True))


@pytest.mark.parametrize("num_tokens", [1, 9])
@pytest.mark.parametrize(("inner", "hidden", "dtype"), [(32, 64, HALF_DTYPE), (24, 40, torch.float32)])
@pytest.mark.parametrize("kind", ["pairs", "tokens", "sorted", "sorted in eights", "by descriptor"])
def test_equals_the_reference(
    num_tokens: int, inner: int, hidden: int, dtype: torch.dtype, kind: str, device: torch.device
) -> None:
    x = torch.randn(num_tokens, hidden + 8, device=device).to(dtype)[:, :hidden]
    gate_up = torch.randn(NUM_EXPERTS, 2 * inner, hidden, device=device).to(dtype)
    down = torch.randn(NUM_EXPERTS, hidden, inner, device=device).to(dtype)
    chosen, shares = choices(num_tokens, device, few_experts=num_tokens == 9)
    if kind != "pairs":
        pairs = chosen if kind == "tokens" else sort_pairs(chosen, NUM_EXPERTS)
        tiles = {"sorted": TILES, "by descriptor": replace(TILES, columns_first=True, by_descriptor=True)}.get(
            kind, TILES_OF_8
        )
        inside = grouped_gemm(x, gate_up, pairs, tiles, TOP_K)
        out = grouped_gemm(inside, down, pairs, tiles, TOP_K, shares)
    else:
        inside = grouped_gemv(x, gate_up, chosen, ROWS, TOP_K)
        out = grouped_gemv(inside, down, chosen, ROWS, TOP_K, shares)
    expected = reference(x, gate_up, down, chosen, shares)
    assert out.shape == expected.shape
    assert relative_error(out, expected) < (2e-6 if dtype == torch.float32 else 3 * BFLOAT16_BOUND)


@pytest.mark.parametrize(("inner", "hidden"), [(32, 64), (24, 40)])
def test_one_row_is_normed_before_and_added_to_the_residual(inner: int, hidden: int, device: torch.device) -> None:
    residual, norm = torch.randn(1, hidden, device=device), torch.rand(hidden, device=device)
    gate_up = torch.randn(NUM_EXPERTS, 2 * inner, hidden, device=device)
    down = torch.randn(NUM_EXPERTS, hidden, inner, device=device)
    chosen, shares = choices(1, device)
    expected = residual.double() + reference(rms_norm(residual, norm, 1e-6), gate_up, down, chosen, shares).sum(dim=0)
    inside = grouped_gemv(residual, gate_up, chosen, ROWS, TOP_K, norm=norm, eps=1e-6)
    add_down_of_row(inside, down, chosen, shares, ROWS, residual)
    assert relative_error(residual, expected) < 2e-6


@pytest.mark.parametrize(
    ("num_tokens", "inner", "hidden", "kind"), [(1, 24, 40, torch.int8), (9, 32, 64, torch.float8_e4m3fn)]
)
def test_weights_of_8_bits_have_scales(
    num_tokens: int, inner: int, hidden: int, kind: torch.dtype, device: torch.device
) -> None:
    x = torch.randn(num_tokens, hidden, device=device)
    gate_up = (torch.randn(NUM_EXPERTS, 2 * inner, hidden, device=device) * 9).to(kind)
    down = (torch.randn(NUM_EXPERTS, hidden, inner, device=device) * 9).to(kind)
    scales = [torch.rand(weight.shape[:2], device=device) / 9 for weight in (gate_up, down)]
    chosen, shares = choices(num_tokens, device)
    wide = [weight.float() * scale[:, :, None] for weight, scale in zip((gate_up, down), scales, strict=True)]
    expected = reference(x, wide[0], wide[1], chosen, shares)
    pairs = sort_pairs(chosen, NUM_EXPERTS)
    inside = grouped_gemm(x, gate_up, pairs, TILES, TOP_K, scales=scales[0])
    out = grouped_gemm(inside, down, pairs, TILES, TOP_K, shares, scales[1])
    assert relative_error(out, expected) < 2e-6
    inside = grouped_gemv(x, gate_up, chosen, ROWS, TOP_K, scales=scales[0])
    out = grouped_gemv(inside, down, chosen, ROWS, TOP_K, shares, scales=scales[1])
    assert relative_error(out, expected) < 2e-6
    if num_tokens == 1:
        residual = torch.zeros(1, hidden, device=device)
        add_down_of_row(inside, down, chosen, shares, ROWS, residual, scales[1])
        assert relative_error(residual, expected.sum(dim=0)) < 2e-6


@pytest.mark.parametrize(("num_tokens", "inner", "hidden"), [(1, 32, 64), (3, 24, 40)])
def test_biases_and_a_clamped_gate(num_tokens: int, inner: int, hidden: int, device: torch.device) -> None:
    x = torch.randn(num_tokens, hidden, device=device)
    gate_up = torch.randn(NUM_EXPERTS, 2 * inner, hidden, device=device)
    down = torch.randn(NUM_EXPERTS, hidden, inner, device=device)
    biases = [torch.randn(weight.shape[:2], device=device) * 3 for weight in (gate_up, down)]
    chosen, shares = choices(num_tokens, device)
    parts = []
    for j in range(TOP_K):
        experts = chosen[:, j].long()
        g, u = (torch.einsum("th,tih->ti", x, gate_up[experts]) + biases[0][experts]).chunk(2, dim=-1)
        g, u = g.clamp(max=LIMIT), u.clamp(-LIMIT, LIMIT)
        y = torch.einsum("ti,thi->th", (u + 1) * g * torch.sigmoid(ALPHA * g), down[experts])
        parts.append((y + biases[1][experts]) * shares[:, j, None])
    expected, gate_bias, gate = torch.stack(parts), biases[0], (ALPHA, LIMIT)
    for pairs in (sort_pairs(chosen, NUM_EXPERTS), chosen):
        inside = grouped_gemm(x, gate_up, pairs, TILES, TOP_K, bias=gate_bias, gate=gate)
        assert (
            relative_error(grouped_gemm(inside, down, pairs, TILES, TOP_K, shares, bias=biases[1]), expected) < 2e-6
        )
    inside = grouped_gemv(x, gate_up, chosen, ROWS, TOP_K, bias=gate_bias, gate=gate)
    assert relative_error(grouped_gemv(inside, down, chosen, ROWS, TOP_K, shares, bias=biases[1]), expected) < 2e-6
    if num_tokens == 1:
        residual = torch.zeros(1, hidden, device=device)
        add_down_of_row(inside, down, chosen, shares, ROWS, residual, bias=biases[1])
        assert relative_error(residual, expected.sum(dim=0)) < 2e-6


@pytest.mark.parametrize("num_tokens", [2, 9])
def test_pairs_of_other_ranks_are_left_out(num_tokens: int, device: torch.device) -> None:
    x = torch.randn(num_tokens, 32, device=device)
    gate_up = torch.randn(NUM_EXPERTS, 32, 32, device=device)
    down = torch.randn(NUM_EXPERTS, 32, 16, device=device)
    chosen, shares = choices(num_tokens, device)
    is_held = chosen < 4
    expected = (reference(x, gate_up, down, chosen, shares) * is_held.T[:, :, None]).sum(dim=0)
    chosen = torch.where(is_held, chosen, -1).contiguous()
    pairs = sort_pairs(chosen, 4)
    assert int(pairs.counts.sum()) == int(is_held.sum())
    inside = grouped_gemm(x, gate_up[:4], pairs, TILES, TOP_K)
    parts = grouped_gemm(inside, down[:4], pairs, TILES, TOP_K, shares)
    assert relative_error(sum_of_held(parts, chosen), expected) < 2e-6
    inside = grouped_gemv(x, gate_up[:4], chosen, ROWS, TOP_K)
    parts = grouped_gemv(inside, down[:4], chosen, ROWS, TOP_K, shares)
    assert relative_error(sum_of_held(parts, chosen), expected) < 2e-6


def test_a_token_is_the_same_in_any_company(device: torch.device) -> None:
    x = torch.randn(8, 64, device=device).to(HALF_DTYPE)
    gate_up = torch.randn(NUM_EXPERTS, 64, 64, device=device).to(HALF_DTYPE)
    chosen, _ = choices(8, device)
    all_of_them = grouped_gemm(x, gate_up, sort_pairs(chosen, NUM_EXPERTS), TILES, TOP_K)
    alone = grouped_gemm(x[3:4], gate_up, sort_pairs(chosen[3:4].contiguous(), NUM_EXPERTS), TILES, TOP_K)
    assert torch.equal(all_of_them[3 * TOP_K : 4 * TOP_K], alone)


def test_a_weight_of_other_columns_is_refused(device: torch.device) -> None:
    chosen, _ = choices(2, device)
    with pytest.raises(ValueError, match="columns"):
        grouped_gemv(torch.randn(2, 32, device=device), torch.randn(6, 8, 64, device=device), chosen, ROWS, TOP_K)


@pytest.mark.parametrize(("num_tokens", "columns_first"), [(9, False), (40, True)])
def test_a_quantized_x_has_scales_of_its_rows(num_tokens: int, columns_first: bool, device: torch.device) -> None:
    hidden, inner = 64, 32
    values, x_scales = quantize_rows(torch.randn(num_tokens, hidden, device=device), FP8_DTYPE)
    gate_up = (torch.randn(NUM_EXPERTS, 2 * inner, hidden, device=device) * 9).to(FP8_DTYPE)
    down = (torch.randn(NUM_EXPERTS, hidden, inner, device=device) * 9).to(FP8_DTYPE)
    scales = [torch.rand(weight.shape[:2], device=device) / 9 for weight in (gate_up, down)]
    chosen, shares = choices(num_tokens, device)
    tiles = replace(TILES, columns_first=columns_first, by_descriptor=columns_first)
    pairs, dtype = sort_pairs(chosen, NUM_EXPERTS), torch.float32
    inside = grouped_gemm(values, gate_up, pairs, tiles, TOP_K, scales=scales[0], x_scales=x_scales, dtype=dtype)
    x, wide = values.double() * x_scales[:, None], gate_up.double() * scales[0][:, :, None]
    both = torch.einsum("th,tjih->tji", x, wide[chosen.long()]).flatten(0, 1)
    assert relative_error(inside, silu_mul(both)) < BFLOAT16_BOUND
    values, x_scales = quantize_rows(inside, FP8_DTYPE)
    out = grouped_gemm(values, down, pairs, tiles, TOP_K, shares, scales[1], x_scales=x_scales, dtype=torch.float32)
    x, wide = values.double() * x_scales[:, None], down.double() * scales[1][:, :, None]
    expected = torch.einsum("tji,tjhi->jth", x.view(num_tokens, TOP_K, -1), wide[chosen.long()])
    assert relative_error(out, expected * shares.double().T[:, :, None]) < BFLOAT16_BOUND


def test_a_quantized_x_of_other_weights_is_refused(device: torch.device) -> None:
    chosen, _ = choices(2, device)
    values, scales = quantize_rows(torch.randn(2, 64, device=device), FP8_DTYPE)
    with pytest.raises(ValueError, match="quantized"):
        grouped_gemm(values, torch.randn(6, 8, 64, device=device), chosen, TILES, TOP_K, x_scales=scales)
