"""Memory that weights take, told from a model's files before they are read."""

from __future__ import annotations

import json

from cli.sizing.model_size import weight_bytes
from engine.config import EngineConfig


def test_weights_are_estimated_from_files(tmp_path):
    assert 200 * 10**6 < weight_bytes(EngineConfig()) < 300 * 10**6  # SmolLM2-135M in 16 bits
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "a.safetensors").write_bytes(bytes(1000))
    (tmp_path / "consolidated.safetensors").write_bytes(bytes(1000))  # the same once more
    assert weight_bytes(EngineConfig(str(tmp_path))) == 1000
    assert weight_bytes(EngineConfig(str(tmp_path), quant_mode="fp8")) == 500
    assert weight_bytes(EngineConfig("dry-run")) == 0
    gptq = {"quantization_config": {"quant_method": "gptq", "bits": 4, "group_size": 128}}
    (tmp_path / "config.json").write_text(json.dumps(gptq))
    assert weight_bytes(EngineConfig(str(tmp_path))) == 1000
    assert weight_bytes(EngineConfig(str(tmp_path), quant_mode="none")) == 4000
    assert weight_bytes(EngineConfig(str(tmp_path), dtype="float16")) == 4000
    assert weight_bytes(EngineConfig(str(tmp_path), quant_mode="int8-weight")) == 2000
