"""Experts of a GGUF file keep their bits on a GPU, and give the tokens of their dequantized weights."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("gguf")
pytest.importorskip("transformers")

from engine.assembly import assemble
from engine.config import EngineConfig, GpuConfig
from engine.quantization import conversion
from engine.quantization.gpu_linears import GpuLinears
from tests.engine.gguf.gguf_files import write_gguf
from tests.engine.moe.test_moe import WIDE as WIDE_EXPERTS
from tests.engine.tiny_models import GPT_OSS, TinyModel
from tests.gpu.models import use_small_tiles
from tests.gpu.moe.test_packed_experts import PARAMS, PROMPTS, experts_of
from tests.gpu.quantization.test_gguf_blocks import DequantizedLinears
from tests.gpu.test_engine import generate, open_gpu, reference

TINY = TinyModel(
    "GptOss",
    {
        **GPT_OSS,
        "num_hidden_layers": 2,
        "hidden_size": 64,
        "num_attention_heads": 4,
        "head_dim": 16,
        "intermediate_size": 64,
    },
)


def test_tokens_of_mxfp4_blocks_equal_those_of_their_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    use_small_tiles(monkeypatch, 2)
    path = tmp_path / "m.gguf"
    write_gguf(path, TINY.build(), "gpt-oss", "MXFP4")
    expected = generate(reference(path), PARAMS, PROMPTS)
    monkeypatch.setattr(conversion, "can_keep_on_gpu", lambda *_: True)  # in float32, where nothing is rounded
    made, runner = open_gpu(path, monkeypatch, GpuConfig(), quant_mode="auto")
    assert generate(made, PARAMS, PROMPTS) == expected
    assert {block.stacked.down.itemsize for block in experts_of(runner)} == {0.5}


def test_tokens_of_4_bit_blocks_equal_those_of_their_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    use_small_tiles(monkeypatch, 2)
    path = tmp_path / "m.gguf"
    write_gguf(path, WIDE_EXPERTS.build(), "qwen3moe", "Q4_1")
    monkeypatch.setattr(conversion, "can_keep_on_gpu", lambda *_: True)
    monkeypatch.setattr(conversion, "linears_of", lambda dtype, _device: DequantizedLinears(dtype))
    config = EngineConfig(str(path), device="cpu", dtype="float32", quant_mode="auto", num_gpu_blocks=64)
    expected = generate(assemble(config).engine, PARAMS, PROMPTS)
    monkeypatch.setattr(conversion, "linears_of", lambda _dtype, device: GpuLinears(device))
    made, runner = open_gpu(path, monkeypatch, GpuConfig(), quant_mode="auto")
    assert generate(made, PARAMS, PROMPTS) == expected
    assert {block.stacked.down.itemsize for block in experts_of(runner)} == {0.5}
