"""MXFP4 weights: parts of them, random ones, and what is refused."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from common.errors import ConfigError, UnsupportedModelError
from engine.dummy_weights.weights import DummyWeights
from engine.loader.safetensors import SafetensorsWeights
from engine.quantization.mxfp4 import BLOCKS, SCALES, Mxfp4Weights, RandomMxfp4Weights, dequantize, filled_columns
from tests.engine.driving import directory, open_model
from tests.engine.quantization.published_experts import write_mxfp4
from tests.engine.tiny_models import GPT_OSS, TinyModel, edit_weights


def some_blocks(experts: int, rows: int, columns: int) -> tuple[torch.Tensor, torch.Tensor]:
    blocks = torch.randint(0, 256, (experts, rows, columns // 32, 16), dtype=torch.uint8)
    return blocks, torch.randint(121, 126, blocks.shape[:3], dtype=torch.uint8)


def test_parts_are_those_of_the_dequantized_weight(tmp_path: Path) -> None:
    """Inputs that begin and end within a group are read with the groups around them."""
    torch.manual_seed(0)
    blocks, scales = some_blocks(3, 48, 96)
    save_file({"down_proj" + BLOCKS: blocks, "down_proj" + SCALES: scales}, tmp_path / "model.safetensors")
    weights = Mxfp4Weights(SafetensorsWeights(tmp_path, torch.float32, torch.device("cpu")))
    whole = weights.take("down_proj", (3, 96, 48))
    for columns in (range(96), range(48, 96), range(24, 48), range(8, 9)):
        part = weights.take_part("down_proj", (range(1, 3), columns, range(12, 24)))
        assert torch.equal(part, whole[1:3, columns.start : columns.stop, 12:24])


def test_scales_that_kernels_do_not_take_are_refused(tmp_path: Path) -> None:
    blocks, scales = some_blocks(2, 96, 64)
    scales[1, 3, 0] = 129
    save_file({"down_proj" + BLOCKS: blocks, "down_proj" + SCALES: scales}, tmp_path / "model.safetensors")
    weights = Mxfp4Weights(SafetensorsWeights(tmp_path, torch.float32, torch.device("cpu")))
    expert = partial(weights._expert, "down_proj", columns=range(64), rows=range(96), bias=None, is_gate_up=False)
    assert expert(0).num_columns == 128
    with pytest.raises(UnsupportedModelError, match="expert 1 has a block that is scaled by 2\\^2, more than 2\\^1"):
        expert(1)


def test_random_experts_are_the_same_on_all_ranks() -> None:
    name, cpu = "gate_up_proj", torch.device("cpu")
    weights = RandomMxfp4Weights(DummyWeights(torch.float32, cpu), {name: (3, 64, 48)}, torch.float32, cpu)
    blocks, scales = weights.read(name, range(3), range(48), range(2))
    part = weights.read(name, range(1, 3), range(12, 24), range(1, 2))
    assert torch.equal(part[0], blocks[1:, 12:24, 1:])
    assert torch.equal(part[1], scales[1:, 12:24, 1:])
    assert not torch.equal(blocks[0], blocks[1])
    dequantized = dequantize(blocks, scales, torch.float32)
    assert 0.02 < float(dequantized.std()) < 0.026
    assert torch.equal(weights.take(name, (3, 64, 48)), dequantized)


@pytest.mark.parametrize("count", [2880, 1440, 720, 360])
def test_ranks_fill_up_their_columns_alike(count: int) -> None:
    """Of gpt-oss on 1, 2, 4 and 8 ranks."""
    filled = [filled_columns(range(rank * count, (rank + 1) * count)) for rank in range(2880 // count)]
    assert [before for before, _ in filled] == [rank * count % 32 for rank in range(len(filled))]
    assert {before + count + behind for before, behind in filled} == {
        {2880: 2944, 1440: 1536, 720: 768, 360: 384}[count]
    }


@pytest.mark.slow
@pytest.mark.wing("engine.windows")
def test_blocks_and_scales_of_unlike_shapes_are_refused(tmp_path: Path) -> None:
    write_mxfp4(tmp_path / "m", TinyModel("GptOss", {**GPT_OSS, "hidden_size": 64, "intermediate_size": 32}))
    scales = {f"model.layers.0.mlp.experts.down_proj{SCALES}": torch.zeros(2, 2, 2, dtype=torch.uint8)}
    edit_weights(tmp_path / "m", lambda tensors: tensors.update(scales))
    with pytest.raises(ConfigError, match=r"down_proj: blocks of .* are no MXFP4 weight"):
        open_model(directory(tmp_path / "m"))
