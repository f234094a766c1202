"""Plain weights as blocks of Q8_0 on CPUs."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from engine.config import EngineConfig
from engine.gguf import choose
from engine.gguf.packed import BlockGemm
from engine.gguf.q8_0 import BlockLinears, quantize_q8_0
from engine.layers.linear import Linear
from engine.loader.random_weights import RandomWeights
from engine.quantization.cpu_linears import int8
from kernels.gguf.linear import Blocks, BlockWeight
from tests.engine.driving import directory, open_model
from tests.engine.gguf.test_packed import needs_library, within
from tests.engine.tiny_models import TINY_MODELS, TinyModel

SIZES = {"hidden_size": 128, "intermediate_size": 256, "num_attention_heads": 4, "head_dim": 32}


@needs_library
def test_numbers_are_within_half_a_step_of_their_block() -> None:
    weight = torch.randn(700, 192).bfloat16()
    weight[3, 32:64] = 0.0
    weight[4, :32] *= 1e-4
    found = BlockWeight([Blocks(quantize_q8_0(weight), 8)], 192).dequantize().float()
    steps = weight.float().view(700, -1, 32).abs().amax(dim=2, keepdim=True) / 127
    errors = (found - weight.float()).view(700, -1, 32).abs()
    # Half a step, rounding of the step to float16 (2^-25 where it is subnormal), and of the product to bfloat16.
    assert bool(
        (errors <= steps * 0.5 + weight.float().view_as(errors).abs() * (2**-11 + 2**-8) + 127 * 2**-25).all()
    )
    assert not found[3, 32:64].any()


def test_nothing_is_compiled_for_weights_that_stay_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choose, "library", lambda: pytest.fail("gcc runs"))
    cpu = torch.device("cpu")
    of_ranks = EngineConfig(dtype="bfloat16", tp=2)
    assert choose.block_conversion(RandomWeights(torch.bfloat16, cpu), of_ranks, torch.bfloat16, cpu) is None


@needs_library
def test_columns_that_fill_no_block_stay_in_rows() -> None:
    made = BlockLinears(torch.bfloat16)
    weight = torch.randn(64, 48).bfloat16()
    assert made.of_plain(Linear(weight)).gemm is int8
    wide = made.of_plain(Linear(torch.randn(64, 96).bfloat16(), torch.randn(64).bfloat16()))
    assert isinstance(wide.gemm, BlockGemm)


@needs_library
@pytest.mark.parametrize("name", ["llama", "qwen3-moe"])
def test_a_models_layers_hold_blocks_alone_and_are_closer_than_with_a_scale_a_row(name: str, tmp_path: Path) -> None:
    tiny = TINY_MODELS[name]
    path = TinyModel(tiny.family, {**tiny.changes, **SIZES}).save(tmp_path / "m")
    exact, _ = open_model(directory(path), dtype="float32", quant_mode="none")
    blocks, _ = open_model(directory(path), dtype="bfloat16")
    rows, _ = open_model(directory(path), dtype="bfloat16", quant_mode="int8-weight")
    assert (blocks.quant_mode, rows.quant_mode) == ("q8_0", "int8-weight")
    x = torch.randn(5, 128).bfloat16()
    sums = [0.0, 0.0]
    layers = zip(exact.model.linears(), blocks.model.linears(), rows.model.linears(), strict=True)
    for plain, block, row in ((a.layer, b.layer, c.layer) for a, b, c in layers):
        if not isinstance(block.gemm, BlockGemm):  # logits in float16
            continue
        assert block.dense is None or isinstance(block.dense.gemm, BlockGemm)
        inputs = x if block.num_columns == 128 else torch.randn(5, block.num_columns).bfloat16()
        expected = plain(inputs.float())
        assert within(block(inputs), expected, 0.02)
        for index, layer in enumerate((block, row)):
            sums[index] += float((layer(inputs).float() - expected).square().sum())
    assert 0.0 < sums[0] < sums[1]
