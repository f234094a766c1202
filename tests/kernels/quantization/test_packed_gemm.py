"""GEMMs of packed weights of 2 to 6 bits."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from kernels.gpu.few_rows.gemm_configs import TileConfig
from kernels.gpu.few_rows.split_k import SplitKWorkspace
from kernels.gpu.quantization import packed_stream as packed_stream_module
from kernels.gpu.quantization.packed_gemm import packed_gemm, write_out
from kernels.gpu.quantization.packed_linear import packed_linear
from kernels.gpu.quantization.packed_rows import packed_rows_gemm
from kernels.gpu.quantization.packed_stream import can_stream, packed_stream, share_of
from kernels.gpu.quantization.quantized_tuning import SlicedKConfig, StreamConfig
from kernels.quantization import packed_weights
from kernels.quantization.packed_weights import PackedWeight, dequantize_packed, of_w4, pack_weight
from kernels.quantization.w4a16_gemm import pack_w4
from tests.kernels.helpers import BFLOAT16_BOUND, relative_error

CONFIGS = [TileConfig(64, 128, 1, 4, 2, block_m=16), TileConfig(64, 128, 2, 4, 4, block_m=16)]
ROW_CONFIGS = [SlicedKConfig(16, 128, 2, 2), SlicedKConfig(32, 128, 4, 3, ahead=1, prefetched=2)]
IS_HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability()[0] == 9
KINDS = [(2, 16), (3, 16), (4, 32), (4, 64), (4, 128), (5, 32), (6, 16)]  # bits, columns of a group


def random_parts(bits: int, group: int, n: int, k: int, device: torch.device) -> tuple[Tensor, Tensor, Tensor | None]:
    values = torch.randint(0, 1 << bits, (n, k), dtype=torch.uint8, device=device)
    scales = (torch.rand(n, k // group, device=device) + 0.1).bfloat16()
    return values, scales, None if bits in (3, 6) else torch.randn(n, k // group, device=device).bfloat16()


def packed_of(bits: int, group: int, n: int, k: int, device: torch.device) -> PackedWeight:
    values, scales, zeros = random_parts(bits, group, n, k, device)
    if zeros is not None and bits == 4:
        return of_w4(pack_w4(values, scales, zeros))
    return pack_weight(values, scales, zeros, bits)


def random_case(
    bits: int, group: int, rows: int, n: int, has_bias: bool, device: torch.device
) -> tuple[Tensor, PackedWeight, Tensor | None, Tensor]:
    """Return x, weight, bias, and the result in float64."""
    packed = packed_of(bits, group, n, 768, device)
    x = torch.randn(rows, 768, device=device).bfloat16()
    bias = torch.randn(n, device=device).bfloat16() if has_bias else None
    expected = functional.linear(x.double(), dequantize_packed(packed, torch.float64))
    expected = expected if bias is None else expected + bias.double()
    return x, packed, bias, expected


@pytest.mark.parametrize(("bits", "group"), [(2, 16), (3, 16), (5, 32), (6, 16)])
def test_packing_keeps_every_weight(bits: int, group: int, device: torch.device) -> None:
    values, scales, zeros = random_parts(bits, group, 5, 768, device)
    expected = (values.float() - (1 << bits - 1)) * scales.float().repeat_interleave(group, 1)
    if zeros is not None:
        expected += zeros.float().repeat_interleave(group, 1)
    packed = pack_weight(values, scales, zeros, bits)
    torch.testing.assert_close(dequantize_packed(packed, torch.float32), expected)
    num_high_bytes = 0 if packed.high is None else packed.high.nbytes
    assert packed.words.nbytes + num_high_bytes == values.numel() * bits // 8


@pytest.mark.parametrize(("bits", "group", "k"), [(5, 32, 384), (6, 16, 192), (5, 64, 512), (4, 32, 256)])
def test_what_cannot_be_packed_is_refused(bits: int, group: int, k: int, device: torch.device) -> None:
    with pytest.raises(ValueError, match="not supported"):
        pack_weight(*random_parts(bits, group, 4, k, device), bits)


@pytest.mark.parametrize("config", CONFIGS)
@pytest.mark.parametrize("rows", [3, 17])
@pytest.mark.parametrize(("bits", "group"), KINDS)
@pytest.mark.parametrize(("n", "has_bias"), [(128, True), (75, False)])
def test_equals_the_reference(
    config: TileConfig, rows: int, bits: int, group: int, n: int, has_bias: bool, device: torch.device
) -> None:
    x, packed, bias, expected = random_case(bits, group, rows, n, has_bias, device)
    out = packed_gemm(x, packed, bias, SplitKWorkspace(device), config)
    assert relative_error(out, expected) < BFLOAT16_BOUND
    assert relative_error(packed_weights.packed_linear(x, packed, bias), expected) < BFLOAT16_BOUND


@pytest.mark.parametrize("config", ROW_CONFIGS)
@pytest.mark.parametrize("rows", [1, 5])
@pytest.mark.parametrize(("bits", "group"), KINDS)
@pytest.mark.parametrize(("n", "has_bias"), [(64, True), (75, False)])
def test_few_rows_equal_the_reference(
    config: SlicedKConfig, rows: int, bits: int, group: int, n: int, has_bias: bool, device: torch.device
) -> None:
    x, packed, bias, expected = random_case(bits, group, rows, n, has_bias, device)
    assert relative_error(packed_rows_gemm(x, packed, bias, config), expected) < BFLOAT16_BOUND


@pytest.mark.skipif(not IS_HOPPER, reason="needs Hopper's tensor cores")
@pytest.mark.parametrize("config", [StreamConfig(1, 8, 168), StreamConfig(2, 4, 128)])
@pytest.mark.parametrize("rows", [3, 17, 128])
@pytest.mark.parametrize(("bits", "group"), KINDS)
@pytest.mark.parametrize(("n", "has_bias"), [(512, True), (34_000, False)])
def test_streams_equal_the_reference(
    config: StreamConfig, rows: int, bits: int, group: int, n: int, has_bias: bool, device: torch.device
) -> None:
    """Some tiles are split among programs, and some programs have several tiles."""
    x, packed, bias, expected = random_case(bits, group, rows, n, has_bias, device)
    assert can_stream(x, packed)
    workspace = SplitKWorkspace(device, 1 << 24)
    out = packed_stream(x, packed, bias, workspace, config)
    assert relative_error(out, expected) < BFLOAT16_BOUND
    assert torch.equal(packed_stream(x, packed, bias, workspace, config), out)


def test_what_can_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packed_stream_module, "has_wgmma", lambda _: True)
    device = torch.device("cpu")
    packed, x = packed_of(4, 128, 8, 256, device), torch.zeros(2, 260, dtype=torch.bfloat16)
    assert can_stream(torch.zeros(2, 256, dtype=torch.bfloat16), packed)
    assert not can_stream(x[:, :256], packed)  # rows at 8 bytes
    assert not can_stream(x[1:, 4:], packed)
    assert not can_stream(x, packed_of(4, 256, 8, 256, device))  # a pair for two steps
    assert not can_stream(torch.zeros(129, 256, dtype=torch.bfloat16), packed)
    monkeypatch.setattr(packed_stream_module, "has_wgmma", lambda _: False)
    assert not can_stream(torch.zeros(2, 256, dtype=torch.bfloat16), packed)


@pytest.mark.parametrize(
    ("tiles", "steps", "programs", "share"),
    [(296, 28, 264, 32), (28, 148, 132, 37), (18, 28, 264, 4), (5, 3, 132, 4)],
)
def test_shares_of_programs(tiles: int, steps: int, programs: int, share: int) -> None:
    """Many tiles: equal shares. Few: as many programs for each tile, with at least 4 steps each."""
    assert share_of(tiles, steps, programs, least=4) == share
    assert share * programs >= tiles * steps


def test_activations_far_from_zero(device: torch.device) -> None:
    """The offset common to all columns is added in float32, not rounded with the weights."""
    packed = packed_of(4, 128, 32, 512, device)
    x = (torch.randn(2, 512, device=device) + 30).bfloat16()
    expected = functional.linear(x.double(), dequantize_packed(packed, torch.float64))
    assert relative_error(packed_rows_gemm(x, packed, None, ROW_CONFIGS[0]), expected) < BFLOAT16_BOUND


@pytest.mark.parametrize(("bits", "group"), KINDS)
def test_writing_weights_out(bits: int, group: int, device: torch.device) -> None:
    packed = packed_of(bits, group, 37, 512, device)
    found = write_out(packed, torch.bfloat16)
    torch.testing.assert_close(found, dequantize_packed(packed, torch.bfloat16), rtol=2**-7, atol=2**-7)


@pytest.mark.parametrize("bits", [2, 3, 5, 6])
@pytest.mark.parametrize(
    ("rows", "dtype"), [(1, torch.bfloat16), (40, torch.bfloat16), (300, torch.bfloat16), (2, torch.float32)]
)
def test_any_number_of_rows(rows: int, bits: int, dtype: torch.dtype, device: torch.device) -> None:
    packed = packed_of(bits, 32 if bits == 5 else 16, 96, 256, device)
    x = torch.randn(rows, 256, device=device).to(dtype)
    expected = functional.linear(x.double(), dequantize_packed(packed, torch.float64))
    assert relative_error(packed_linear(x, packed, None, SplitKWorkspace(device)), expected) < BFLOAT16_BOUND


def test_what_does_not_fit_is_refused(device: torch.device) -> None:
    values = torch.zeros(8, 64, dtype=torch.uint8, device=device)
    scales = torch.ones(8, 2, device=device)
    x = torch.randn(2, 64, device=device).bfloat16()
    with pytest.raises(ValueError, match="64 columns"):
        packed_gemm(x, of_w4(pack_w4(values, scales, scales)), None, SplitKWorkspace(device), CONFIGS[0])
    with pytest.raises(ValueError, match="64 columns"):
        packed_rows_gemm(x, of_w4(pack_w4(values, scales, scales)), None, ROW_CONFIGS[0])
    with pytest.raises(ValueError, match="33 rows"):
        packed_rows_gemm(x.repeat(17, 2)[:33], packed_of(4, 32, 8, 128, device), None, ROW_CONFIGS[0])
