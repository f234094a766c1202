from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from kernels.gpu.small_m_gemm import SmallMWorkspace
from kernels.gpu.w4a16_gemm import W4Config, choose, dequantize, w4a16_linear
from kernels.w4a16_gemm import dequantize_w4, pack_w4
from kernels.w4a16_gemm import w4a16_linear as reference
from tests.kernels.helpers import BFLOAT16_BOUND, HALF_DTYPE, relative_error


def random_codes(n: int, k: int, group: int, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    codes = torch.randint(0, 16, (n, k), dtype=torch.uint8, device=device)
    scales = torch.rand(n, k // group, device=device) + 0.1
    return codes, scales.bfloat16(), torch.randn(n, k // group, device=device).bfloat16()


@pytest.mark.parametrize("group", [16, 64, 192, 384])
def test_packing_keeps_every_weight(group: int, device: torch.device) -> None:
    codes, scales, zeros = random_codes(5, 384, group, device)
    expected = (codes.float() - 8) * scales.float().repeat_interleave(group, 1)
    expected += zeros.float().repeat_interleave(group, 1)
    packed = pack_w4(codes, scales, zeros)
    torch.testing.assert_close(dequantize_w4(packed, torch.float32), expected)
    assert packed.group_size <= 128
    assert packed.words.shape == (5, 48)


def test_what_cannot_be_packed_is_refused(device: torch.device) -> None:
    codes, scales, zeros = random_codes(4, 96, 24, device)
    with pytest.raises(ValueError, match="groups of 24"):
        pack_w4(codes, scales, zeros)
    with pytest.raises(ValueError, match="do not fit"):
        pack_w4(codes, scales, zeros[:, :2])


@pytest.mark.parametrize("group", [32, 128])
def test_writing_weights_out(group: int, device: torch.device) -> None:
    packed = pack_w4(*random_codes(3, 2304, group, device))
    torch.testing.assert_close(dequantize(packed, torch.float16), dequantize_w4(packed, torch.float16))


@pytest.mark.parametrize(("rows", "split_k"), [(1, 1), (3, 1), (33, 3)])
@pytest.mark.parametrize(("n", "k", "group"), [(48, 256, 128), (37, 96, 32)])
@pytest.mark.parametrize("has_bias", [False, True])
def test_equals_the_reference(
    rows: int, split_k: int, n: int, k: int, group: int, has_bias: bool, device: torch.device
) -> None:
    dtype = torch.bfloat16 if rows == 1 else HALF_DTYPE
    packed = pack_w4(*random_codes(n, k, group, device))
    x = torch.randn(rows, k, device=device).to(dtype)
    bias = torch.randn(n, device=device).to(dtype) if has_bias else None
    workspace = SmallMWorkspace(device)
    workspace.partials.fill_(float("nan"))
    expected = functional.linear(x.double(), dequantize_w4(packed, torch.float64))
    expected = expected if bias is None else expected + bias.double()
    assert relative_error(reference(x.float(), packed, None if bias is None else bias.float()), expected) < 1e-6
    config = W4Config(16, 128, split_k, num_stages=1)
    for _ in range(2):  # the second launch finds the counters as the first left them
        out = w4a16_linear(x, packed, bias, workspace, config)
        assert relative_error(out, expected) < BFLOAT16_BOUND
        assert not workspace.counters.any()


def test_many_rows_go_through_the_plain_product(device: torch.device) -> None:
    packed = pack_w4(*random_codes(48, 64, 32, device))
    x = torch.randn(65, 64, device=device)
    assert choose(65, 48, 64) is None
    assert choose(64, 48, 64) is not None
    assert relative_error(w4a16_linear(x, packed, None, SmallMWorkspace(device)), reference(x, packed)) < 1e-6


def test_what_does_not_fit_is_refused(device: torch.device) -> None:
    packed = pack_w4(*random_codes(48, 64, 32, device))
    workspace = SmallMWorkspace(device, num_floats=16)
    with pytest.raises(ValueError, match="too small"):
        w4a16_linear(torch.randn(2, 64, device=device), packed, None, workspace, W4Config(16, 128, 2))
    with pytest.raises(ValueError, match="must be bfloat16"):
        w4a16_linear(torch.randn(1, 64, device=device), packed, None, workspace)
