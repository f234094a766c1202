"""Ops for few rows equal the plain ones, whatever the family, with rows of any size in the stream."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from common.model_files import resolve_model
from engine.config import EngineConfig
from engine.cpu.lowering import Rows, lower_model
from engine.layers.attention import Attention
from engine.layers.block import Step
from engine.layers.forward import plain
from engine.layers.rotary import Rotation
from engine.loader.load import load_model
from tests.engine.tiny_models import TINY_MODELS, VOCAB_SIZE, with_wing


class OwnTokenAttention:
    """Every token sees itself only: its output is its V, once per query head of the group."""

    def __init__(self, rotation: Rotation) -> None:
        self.rotation = rotation

    def attend(self, block: Attention, qkv: Tensor) -> Tensor:
        block.norm_and_rotate_(qkv, self.rotation)
        q, k, v = qkv.split([block.num_heads, block.num_kv_heads, block.num_kv_heads], dim=1)
        group = block.num_heads // block.num_kv_heads
        # q and k take part, so that a wrong rotation shows.
        return (v.repeat_interleave(group, dim=1) + q * k.repeat_interleave(group, dim=1)).flatten(1)


@pytest.mark.parametrize("family", map(with_wing, ["llama", "mistral", "qwen2", "qwen3", "qwen3-moe", "mixtral"]))
@pytest.mark.parametrize("num_rows", [1, 5])
def test_equal_the_plain_ops(family: str, num_rows: int, tmp_path: Path) -> None:
    path = TINY_MODELS[family].save(tmp_path)
    config = EngineConfig(model=str(path), device="cpu", dtype="float32")
    model = load_model(resolve_model(str(path)), config, torch.device("cpu")).model
    token_ids = torch.arange(num_rows) * 17 % VOCAB_SIZE
    positions = torch.arange(num_rows) * 9
    step = Step(token_ids, positions, OwnTokenAttention(Rotation.of(model.rotary, positions)).attend)
    with torch.inference_mode():
        expected, exact, few = (
            (forward.hidden(step), forward.logits(forward.hidden(step)))
            for forward in (plain(model), lower_model(model, Rows.ANY), lower_model(model, Rows.FEW))
        )
    torch.testing.assert_close(exact, expected, atol=0, rtol=0)
    torch.testing.assert_close(few, expected, atol=1e-4, rtol=1e-4)
