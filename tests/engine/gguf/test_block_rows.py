"""Quantized GGUF blocks kept as they are: reads, products, and how close a whole model stays to the file."""

from __future__ import annotations

from pathlib import Path

import gguf
import pytest
import torch

from engine.cpu_gemms.gemms import half
from engine.gguf.block_rows import block_rows
from engine.gguf.config import config_from_gguf
from engine.gguf.weights import GgufFile, GgufWeights
from engine.quantization.cpu_linears import int4
from engine.quantization.int4 import quantize_int4
from tests.engine.gguf.gguf_files import load_and_read, random_blocks, write_wide

KINDS = [gguf.GGMLQuantizationType[name] for name in ("Q4_0", "Q4_1", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K")]


@pytest.mark.parametrize("kind", KINDS)
def test_rows_are_what_the_gguf_package_reads(kind: gguf.GGMLQuantizationType) -> None:
    raw = random_blocks(kind, (8, 512))
    expected = torch.from_numpy(gguf.dequantize(raw, kind))
    rows = block_rows(torch.from_numpy(raw), int(kind))
    assert rows.bits == int(kind.name[1])
    bound = rows.scales.abs() * rows.middle + rows.offsets_or_zeros().abs()  # scales and offsets are bfloat16
    error = (rows.dequantize(torch.float32) - expected).abs().view(8, -1, rows.group_size)
    assert bool((error <= bound[..., None] / 256).all())
    parts = [rows.cut_columns(range(256)), rows.cut_columns(range(256, 512))]
    whole = torch.cat([part.dequantize(torch.float32) for part in parts], 1)
    assert torch.equal(whole, rows.dequantize(torch.float32))


@pytest.mark.parametrize("kind", ["Q4_1", "Q4_K"])
def test_a_model_of_4_bit_blocks_stays_close_to_its_file(kind: str, tmp_path: Path) -> None:
    files, logprobs = write_wide(tmp_path, kind), {}
    for mode, dtype in (("none", "float32"), ("int8-weight", "bfloat16"), ("int4-weight", "bfloat16")):
        loaded, logprobs[mode] = load_and_read(files, dtype, mode)
    assert next(loaded.model.linears()).layer.gemm is int4
    assert loaded.model.head.gemm is half
    error = {mode: float((values - logprobs["none"]).abs().mean()) for mode, values in logprobs.items()}
    if kind == "Q4_1":  # minima of the other are random: offsets, rounded to bfloat16, are larger than in real files
        assert error["int4-weight"] < error["int8-weight"]
    assert error["int4-weight"] < 0.05 * float(logprobs["none"].std())


def test_4_bit_blocks_come_to_the_models_device(tmp_path: Path) -> None:
    file = GgufFile(write_wide(tmp_path, "Q4_1").path)
    config = config_from_gguf(file.metadata, "LlamaForCausalLM", has_output_weight=True)
    weights = GgufWeights(file, config, True, torch.bfloat16, torch.device("meta"))
    weights.kept_bits = (4,)
    name = "model.layers.0.self_attn.q_proj.weight"
    assert weights.take(name, weights.shapes[name]).is_meta
    assert weights.rows(name).values.is_meta


def test_rounding_is_within_half_a_step() -> None:
    torch.manual_seed(0)
    weight = torch.randn(48, 96) + 3 * torch.randn(48, 3).repeat_interleave(32, dim=1)
    weight[5, :32] = 2.0  # a group of equal weights
    rows = quantize_int4(weight)
    assert int(rows.values.max()) == 15
    assert int(rows.values.min()) == 0
    step = rows.scales.repeat_interleave(32, dim=1)
    offset = rows.offsets_or_zeros().abs().repeat_interleave(32, dim=1) / 256  # bfloat16 rounding of the offset
    assert bool(((rows.dequantize(torch.float32) - weight).abs() <= 0.6 * step + offset + 1e-6).all())


def test_a_plain_model_is_rounded_to_4_bits_but_for_its_output_projection(tmp_path: Path) -> None:
    files = write_wide(tmp_path, "F32")
    exact, (loaded, rounded) = (load_and_read(files, "bfloat16", mode) for mode in ("none", "int4-weight"))
    kinds = [ref.layer.gemm for ref in loaded.model.linears()]
    assert kinds == [int4] * (len(kinds) - 1) + [half]
    assert float((exact[1] - rounded).abs().mean()) < 0.3 * float(exact[1].std())
