"""GEMMs of packed weights of 4, 5 and 6 bits."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from kernels.gpu.gemm.split_k import SplitKWorkspace
from kernels.gpu.launching.launch_configs import TileConfig
from kernels.gpu.quantization.packed_gemm import packed_gemm, packed_linear, write_out
from kernels.quantization import packed_weights
from kernels.quantization.packed_weights import PackedWeight, dequantize_packed, of_w4, pack_weight
from kernels.quantization.w4a16_gemm import pack_w4
from tests.kernels.helpers import BFLOAT16_BOUND, relative_error

CONFIGS = [TileConfig(64, 128, 1, 4, 2, block_m=16), TileConfig(64, 128, 2, 4, 4, block_m=16)]
KINDS = [(4, 32), (4, 64), (4, 128), (5, 32), (6, 16)]  # bits, columns of a group


def random_parts(bits: int, group: int, n: int, k: int, device: torch.device) -> tuple[Tensor, Tensor, Tensor | None]:
    values = torch.randint(0, 1 << bits, (n, k), dtype=torch.uint8, device=device)
    scales = (torch.rand(n, k // group, device=device) + 0.1).bfloat16()
    return values, scales, None if bits == 6 else torch.randn(n, k // group, device=device).bfloat16()


def packed_of(bits: int, group: int, n: int, k: int, device: torch.device) -> PackedWeight:
    values, scales, zeros = random_parts(bits, group, n, k, device)
    if zeros is not None and bits == 4:
        return of_w4(pack_w4(values, scales, zeros))
    return pack_weight(values, scales, zeros, bits)


@pytest.mark.parametrize(("bits", "group"), [(5, 32), (6, 16)])
def test_packing_keeps_every_weight(bits: int, group: int, device: torch.device) -> None:
    values, scales, zeros = random_parts(bits, group, 5, 768, device)
    expected = (values.float() - (1 << bits - 1)) * scales.float().repeat_interleave(group, 1)
    if zeros is not None:
        expected += zeros.float().repeat_interleave(group, 1)
    packed = pack_weight(values, scales, zeros, bits)
    torch.testing.assert_close(dequantize_packed(packed, torch.float32), expected)
    assert packed.high is not None
    assert packed.words.nbytes + packed.high.nbytes == values.numel() * bits // 8


@pytest.mark.parametrize(("bits", "group", "k"), [(5, 32, 384), (6, 16, 192), (5, 64, 512), (4, 32, 256)])
def test_what_cannot_be_packed_is_refused(bits: int, group: int, k: int, device: torch.device) -> None:
    with pytest.raises(ValueError, match="not supported"):
        pack_weight(*random_parts(bits, group, 4, k, device), bits)


@pytest.mark.parametrize("config", CONFIGS)
@pytest.mark.parametrize("rows", [1, 3, 17])
@pytest.mark.parametrize(("bits", "group"), KINDS)
@pytest.mark.parametrize(("n", "has_bias"), [(128, True), (75, False)])
def test_equals_the_reference(
    config: TileConfig, rows: int, bits: int, group: int, n: int, has_bias: bool, device: torch.device
) -> None:
    packed = packed_of(bits, group, n, 768, device)
    x = torch.randn(rows, 768, device=device).bfloat16()
    bias = torch.randn(n, device=device).bfloat16() if has_bias else None
    expected = functional.linear(x.double(), dequantize_packed(packed, torch.float64))
    expected = expected if bias is None else expected + bias.double()
    out = packed_gemm(x, packed, bias, SplitKWorkspace(device), config)
    assert relative_error(out, expected) < BFLOAT16_BOUND
    assert relative_error(packed_weights.packed_linear(x, packed, bias), expected) < BFLOAT16_BOUND


@pytest.mark.parametrize(("bits", "group"), KINDS)
def test_writing_weights_out(bits: int, group: int, device: torch.device) -> None:
    packed = packed_of(bits, group, 37, 512, device)
    found = write_out(packed, torch.bfloat16)
    torch.testing.assert_close(found, dequantize_packed(packed, torch.bfloat16), rtol=2**-7, atol=2**-7)


@pytest.mark.parametrize(("rows", "dtype"), [(40, torch.bfloat16), (300, torch.bfloat16), (2, torch.float32)])
def test_any_number_of_rows(rows: int, dtype: torch.dtype, device: torch.device) -> None:
    packed = packed_of(6, 16, 96, 256, device)
    x = torch.randn(rows, 256, device=device).to(dtype)
    expected = functional.linear(x.double(), dequantize_packed(packed, torch.float64))
    assert relative_error(packed_linear(x, packed, None, SplitKWorkspace(device)), expected) < BFLOAT16_BOUND


def test_what_does_not_fit_is_refused(device: torch.device) -> None:
    values = torch.zeros(8, 64, dtype=torch.uint8, device=device)
    scales = torch.ones(8, 2, device=device)
    x = torch.randn(2, 64, device=device).bfloat16()
    with pytest.raises(ValueError, match="64 columns"):
        packed_gemm(x, of_w4(pack_w4(values, scales, scales)), None, SplitKWorkspace(device), CONFIGS[0])
