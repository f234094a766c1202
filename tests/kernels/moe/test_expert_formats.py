"""Grouped kernels over experts of 4 bits, and of 8 bits in groups, against their dequantized weights."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from kernels.gpu.few_rows.gemm_configs import GemvConfig, TileConfig
from kernels.gpu.moe.expert_pairs import sort_pairs
from kernels.gpu.moe.grouped_gemm import MAX_UNSORTED, grouped_gemm
from kernels.gpu.moe.grouped_gemv import add_down_of_row, grouped_gemv
from kernels.quantization.mxfp4 import MAX_EXPONENT, dequantize_mxfp4, pack_mxfp4
from kernels.quantization.w4a16_gemm import dequantize_w4, pack_w4
from tests.kernels.helpers import INT4_FLOAT32_BOUND, relative_error
from tests.kernels.moe.test_grouped_gemm import NUM_EXPERTS, TOP_K, choices, reference

TILES = TileConfig(64, 64, num_stages=1, block_m=16)
MANY = TileConfig(64, 256, num_stages=1, block_m=64)
ROWS = GemvConfig(64, 256, num_warps=2, num_stages=1)
FEW_ROWS = GemvConfig(8, 256, num_warps=4, num_stages=1)  # where a program has all of a row's experts
Weights = tuple[Tensor, Tensor, Tensor]  # values, scales, and the numbers they stand for


def int4(rows: int, columns: int, group: int, device: torch.device) -> Weights:
    shape = NUM_EXPERTS * rows, columns // group
    values = torch.randint(0, 16, (shape[0], columns), device=device).to(torch.uint8)
    packed = pack_w4(values, torch.rand(shape, device=device), torch.randn(shape, device=device))
    exact = dequantize_w4(packed, torch.float32)
    words, pairs = (part.unflatten(0, (NUM_EXPERTS, rows)) for part in (packed.words, packed.scales_and_zeros))
    return words, pairs, exact.unflatten(0, (NUM_EXPERTS, rows))


def e2m1(rows: int, columns: int, group: int, device: torch.device) -> Weights:
    blocks = torch.randint(0, 256, (NUM_EXPERTS, rows, columns // group, 16), device=device).to(torch.uint8)
    exponents = torch.randint(114, MAX_EXPONENT + 1, blocks.shape[:3], device=device).to(torch.uint8)
    words, exponents = pack_mxfp4(blocks, exponents)
    return words, exponents, dequantize_mxfp4(words, exponents, torch.float32)[..., :columns]


def eight_bits(rows: int, columns: int, group: int, device: torch.device) -> Weights:
    values = (torch.randn(NUM_EXPERTS, rows, columns, device=device) * 9).to(torch.float8_e4m3fn)
    scales = torch.rand(NUM_EXPERTS, rows, columns // group, device=device)
    return values, scales, values.float() * scales.repeat_interleave(group, dim=2)


BOUNDS = {"int4": INT4_FLOAT32_BOUND, "e2m1": 2e-6, "e4m3": 2e-6}
MAKERS = {"int4": int4, "e2m1": e2m1, "e4m3": eight_bits}


@pytest.mark.parametrize(
    ("maker", "inner", "hidden", "group", "num_tokens"),
    [
        ("int4", 64, 128, 32, 2), ("int4", 128, 384, 128, 1), ("int4", 64, 128, 64, 40), ("int4", 64, 64, 16, 2),
        ("e2m1", 64, 128, 32, 3), ("e2m1", 128, 64, 32, 40),
        ("e4m3", 64, 128, 32, 3), ("e4m3", 48, 96, 48, 2),
    ],
)  # fmt: skip
def test_equals_the_weights_that_are_meant(
    maker: str, inner: int, hidden: int, group: int, num_tokens: int, device: torch.device
) -> None:
    x = torch.randn(num_tokens, hidden, device=device)
    gate_up, scales, wide = MAKERS[maker](2 * inner, hidden, min(group, hidden), device)
    down, down_scales, wide_down = MAKERS[maker](hidden, inner, min(group, inner), device)
    chosen, shares = choices(num_tokens, device)
    expected = reference(x, wide, wide_down, chosen, shares)
    pairs, tiles = (sort_pairs(chosen, NUM_EXPERTS), MANY) if num_tokens > MAX_UNSORTED else (chosen, TILES)
    inside = grouped_gemm(x, gate_up, pairs, tiles, TOP_K, scales=scales)
    out = grouped_gemm(inside, down, pairs, tiles, TOP_K, shares, down_scales)
    assert relative_error(out, expected) < BOUNDS[maker]
    if num_tokens <= MAX_UNSORTED:
        inside = grouped_gemv(x, gate_up, chosen, ROWS, TOP_K, scales=scales)
        out = grouped_gemv(inside, down, chosen, ROWS, TOP_K, shares, scales=down_scales)
        assert relative_error(out, expected) < BOUNDS[maker]


@pytest.mark.parametrize("maker", ["int4", "e2m1", "e4m3"])
@pytest.mark.parametrize("num_tokens", [1, 3])
def test_biases_are_added_once(maker: str, num_tokens: int, device: torch.device) -> None:
    """Also for one row, whose programs add up slices of an expert's columns."""
    x = torch.randn(num_tokens, 128, device=device)
    weight, scales, wide = MAKERS[maker](64, 128, 32, device)
    bias = 9 * torch.randn(NUM_EXPERTS, 64, device=device)
    chosen, shares = choices(num_tokens, device)
    pairs_of_x = x.repeat_interleave(TOP_K, dim=0)
    experts = chosen.flatten().long()
    y = torch.einsum("pk,pnk->pn", pairs_of_x.double(), wide.double()[experts]) + bias[experts]
    expected = (y * shares.flatten()[:, None]).unflatten(0, (num_tokens, TOP_K)).transpose(0, 1)
    for out in (
        grouped_gemm(pairs_of_x, weight, chosen, TILES, TOP_K, shares, scales, bias),
        grouped_gemm(pairs_of_x, weight, sort_pairs(chosen, NUM_EXPERTS), TILES, TOP_K, shares, scales, bias),
        grouped_gemv(pairs_of_x, weight, chosen, FEW_ROWS, TOP_K, shares, scales=scales, bias=bias),
    ):
        assert relative_error(out, expected) < BOUNDS[maker]
    if num_tokens == 1:
        residual = torch.zeros(1, 64, device=device)
        add_down_of_row(pairs_of_x, weight, chosen, shares, FEW_ROWS, residual, scales, bias)
        assert relative_error(residual, expected.sum(dim=0)) < BOUNDS[maker]
