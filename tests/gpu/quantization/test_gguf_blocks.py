"""Blocks of a GGUF file keep their bits on a GPU, and give the tokens of their dequantized weights."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

pytest.importorskip("gguf")
pytest.importorskip("transformers")

from engine.assembly import assemble
from engine.config import EngineConfig, GpuConfig
from engine.layers.linear import Linear
from engine.quantization import conversion
from engine.quantization.gpu_linears import GpuLinears
from engine.quantization.quantized_rows import Made, QuantizedRows
from tests.engine.gguf.gguf_files import WIDE, write_gguf
from tests.engine.tiny_models import TinyModel
from tests.gpu.models import use_small_tiles
from tests.gpu.quantization.test_quantized import PROMPTS, ReferenceLinears, generate
from tests.gpu.test_engine import open_gpu


class DequantizedLinears(ReferenceLinears):
    block_bits = GpuLinears.block_bits

    def of_rows(self, rows: QuantizedRows, bias: torch.Tensor | None, is_stacked: bool = False) -> Made | None:
        return Linear(rows.dequantize(torch.float32), bias), "plain"


@pytest.mark.parametrize("kind", ["Q4_0", "Q4_1", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K"])
def test_tokens_equal_those_of_dequantized_blocks(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In float32, where nothing else is rounded."""
    use_small_tiles(monkeypatch, 2)
    path = tmp_path / "m.gguf"
    write_gguf(path, TinyModel("Llama", WIDE).build(), "llama", kind)
    monkeypatch.setattr(conversion, "can_keep_on_gpu", lambda *_: True)
    monkeypatch.setattr(conversion, "linears_of", lambda dtype, _device: DequantizedLinears(dtype))
    config = EngineConfig(str(path), device="cpu", dtype="float32", quant_mode="auto", num_gpu_blocks=64)
    expected = generate(assemble(config).engine, PROMPTS)
    kinds: list[str] = []

    class Watched(GpuLinears):
        def of_rows(self, rows: QuantizedRows, bias: torch.Tensor | None, is_stacked: bool = False) -> Made | None:
            made = super().of_rows(rows, bias, is_stacked)
            assert made is not None
            kinds.append(made[1])
            return made

    monkeypatch.setattr(conversion, "linears_of", lambda _dtype, device: Watched(device))
    made, _ = open_gpu(path, monkeypatch, GpuConfig(), quant_mode="auto")
    assert kinds == 5 * [f"int{kind[1]}"]  # qkv, o, gate and up, down, the output projection
    assert generate(made, PROMPTS) == expected
