"""MXFP4 weights: dequantized as transformers does, and loaded in the place of plain ones."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from common.errors import ConfigError
from engine.loader.mxfp4 import BLOCKS, SCALES, dequantize
from tests.engine.driving import Driver, directory, make_runner, open_model, random_prompt
from tests.engine.tiny_models import GPT_OSS, VOCAB_SIZE, TinyModel

EXPERTS = ("gate_up_proj", "down_proj")


def some_blocks(experts: int, rows: int, columns: int) -> tuple[torch.Tensor, torch.Tensor]:
    blocks = torch.randint(0, 256, (experts, rows, columns // 32, 16), dtype=torch.uint8)
    return blocks, torch.randint(121, 126, blocks.shape[:3], dtype=torch.uint8)


def test_numbers_are_those_of_transformers() -> None:
    torch.manual_seed(0)
    blocks, scales = some_blocks(3, 48, 64)
    for dtype in (torch.float32, torch.bfloat16):
        expected = convert_moe_packed_tensors(blocks, scales, dtype=dtype)
        assert torch.equal(dequantize(blocks, scales, dtype), expected)


@pytest.mark.slow
def test_a_checkpoint_equals_its_dequantized_copy(tmp_path: Path) -> None:
    torch.manual_seed(0)
    plain = TinyModel("GptOss", {**GPT_OSS, "hidden_size": 64, "intermediate_size": 32}).save(tmp_path / "plain")
    packed = tmp_path / "packed"
    packed.mkdir()
    weights, stored = load_file(plain / "model.safetensors"), {}
    for name, weight in weights.items():
        if name.endswith(EXPERTS):
            blocks, scales = some_blocks(weight.shape[0], weight.shape[2], weight.shape[1])
            stored |= {name + BLOCKS: blocks, name + SCALES: scales}
            weights[name] = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32)
        else:
            stored[name] = weight
    save_file(weights, plain / "model.safetensors")
    save_file(stored, packed / "model.safetensors")
    raw = json.loads((plain / "config.json").read_text())
    (packed / "config.json").write_text(json.dumps({**raw, "quantization_config": {"quant_method": "mxfp4"}}))
    found = []
    for path in (plain, packed):
        loaded, config = open_model(directory(path), dtype="float32")
        driver = Driver(make_runner(loaded, config), config)
        request = driver.add(random_prompt(30, VOCAB_SIZE, 1), record_logits=True)
        driver.finish([request], 1, chunk=30)
        found.append(driver.logits[request.request_id][0])
    assert torch.equal(*found)
    stored.popitem()
    stored["model.layers.0.mlp.experts.down_proj_scales"] = torch.zeros(2, 2, 2, dtype=torch.uint8)
    save_file(stored, packed / "model.safetensors")
    with pytest.raises(ConfigError, match=r"down_proj: blocks of .* are no MXFP4 weight"):
        open_model(directory(packed))
