from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from kernels.gpu.few_rows.split_k import SplitKWorkspace
from kernels.gpu.quantization.dequantize_w4 import dequantize
from kernels.gpu.quantization.packed_linear import w4a16_linear
from kernels.quantization.w4a16_gemm import PackedW4, dequantize_w4, pack_w4
from kernels.quantization.w4a16_gemm import w4a16_linear as reference
from tests.kernels.helpers import BFLOAT16_BOUND, relative_error


def random_values(n: int, k: int, group: int, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    values = torch.randint(0, 16, (n, k), dtype=torch.uint8, device=device)
    scales = torch.rand(n, k // group, device=device) + 0.1
    return values, scales.bfloat16(), torch.randn(n, k // group, device=device).bfloat16()


def packed_of(n: int, k: int, group: int, device: torch.device) -> PackedW4:
    return pack_w4(*random_values(n, k, group, device))


@pytest.mark.parametrize("group", [16, 64, 192, 384])
def test_packing_keeps_every_weight(group: int, device: torch.device) -> None:
    values, scales, zeros = random_values(5, 384, group, device)
    expected = (values.float() - 8) * scales.float().repeat_interleave(group, 1)
    expected += zeros.float().repeat_interleave(group, 1)
    packed = pack_w4(values, scales, zeros)
    torch.testing.assert_close(dequantize_w4(packed, torch.float32), expected)
    assert packed.group_size <= 128
    assert packed.words.shape == (5, 96)


def test_what_cannot_be_packed_is_refused(device: torch.device) -> None:
    values, scales, zeros = random_values(4, 96, 24, device)
    with pytest.raises(ValueError, match="groups of 24"):
        pack_w4(values, scales, zeros)
    with pytest.raises(ValueError, match="do not fit"):
        pack_w4(values, scales, zeros[:, :2])


@pytest.mark.parametrize("group", [32, 128])
def test_writing_weights_out(group: int, device: torch.device) -> None:
    packed = packed_of(3, 2304, group, device)
    torch.testing.assert_close(dequantize(packed, torch.float16), dequantize_w4(packed, torch.float16))


@pytest.mark.parametrize("rows", [1, 3, 19, 130])
@pytest.mark.parametrize(("n", "k", "group"), [(48, 256, 128), (37, 384, 32), (37, 96, 32)])
@pytest.mark.parametrize("has_bias", [False, True])
def test_equals_the_reference(rows: int, n: int, k: int, group: int, has_bias: bool, device: torch.device) -> None:
    packed = packed_of(n, k, group, device)
    x = torch.randn(rows, k, device=device).bfloat16()
    bias = torch.randn(n, device=device).bfloat16() if has_bias else None
    expected = functional.linear(x.double(), dequantize_w4(packed, torch.float64))
    expected = expected if bias is None else expected + bias.double()
    assert relative_error(reference(x.float(), packed, None if bias is None else bias.float()), expected) < 1e-6
    out = w4a16_linear(x, packed, bias, SplitKWorkspace(device))
    assert relative_error(out, expected) < BFLOAT16_BOUND


@pytest.mark.parametrize(
    ("rows", "k", "dtype"), [(300, 128, torch.bfloat16), (3, 64, torch.float32), (1, 128, torch.float16)]
)
def test_others_go_through_the_plain_gemm(rows: int, k: int, dtype: torch.dtype, device: torch.device) -> None:
    packed = packed_of(48, k, 32, device)
    x = torch.randn(rows, k, device=device).to(dtype)
    bound = 1e-6 if dtype == torch.float32 else BFLOAT16_BOUND
    assert (
        relative_error(w4a16_linear(x, packed, None, SplitKWorkspace(device)), reference(x.float(), packed)) < bound
    )
