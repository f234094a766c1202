"""Experts that a GGUF file holds as MXFP4, dequantized and as kernels of experts take them."""

from __future__ import annotations

from pathlib import Path

import torch

from engine.gguf.config import adapted_config
from engine.gguf.mxfp4 import weights_of
from engine.gguf.weights import GgufFile
from engine.models.families import family_of
from engine.quantization.mxfp4 import Mxfp4Source, dequantize
from tests.engine.gguf.gguf_files import write_gguf
from tests.engine.gguf.test_gguf import FAMILIES, check_against_transformers
from tests.engine.tiny_models import GPT_OSS, TinyModel


def test_experts_in_mxfp4_equal_transformers(tmp_path: Path) -> None:
    check_against_transformers(tmp_path / "m.gguf", FAMILIES["gpt-oss"][0], "gpt-oss", "MXFP4")


def test_blocks_are_read_as_a_checkpoints(tmp_path: Path) -> None:
    tiny = TinyModel("GptOss", {**GPT_OSS, "hidden_size": 64, "intermediate_size": 96})
    write_gguf(tmp_path / "m.gguf", tiny.build(), "gpt-oss", "MXFP4")
    file = GgufFile(tmp_path / "m.gguf")
    config = adapted_config(file, family_of("GptOssForCausalLM"))
    weights = weights_of(file, config, False, torch.float32, torch.device("cpu"))
    assert isinstance(weights, Mxfp4Source)
    layer = "model.layers.1.mlp.experts."
    assert not weights.is_packed(f"{layer}down_proj_bias")
    parts = {
        "gate_up_proj": (range(6), range(192), range(2)),
        "down_proj": (range(2, 4), range(8, 40), range(1, 3)),
    }
    for name, (experts, rows, groups) in parts.items():
        assert weights.is_packed(layer + name)
        blocks, scales = weights.read(layer + name, experts, rows, groups)
        expected = weights.take_part(layer + name, (experts, range(groups.start * 32, groups.stop * 32), rows))
        assert torch.equal(dequantize(blocks, scales, torch.float32), expected)
