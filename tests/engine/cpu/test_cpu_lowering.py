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
from kernels.cpu_norm import add_rms_norm_of_opposed, opposed, signs_like
from kernels.rms_norm import rms_norm
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


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])  # of the result
@pytest.mark.parametrize("scale", [1e-3, 1.0, 300.0])
def test_norm_of_opposed_rows_is_the_rms_norm(dtype: torch.dtype, scale: float) -> None:
    """Also for rows that are far from zero on average, and with single entries far above the rest."""
    torch.manual_seed(0)
    x = (torch.randn(6, 200) + torch.arange(6.0)[:, None]) * scale
    x[3, 7] = 200 * scale
    weight = (1 + torch.randn(200) / 5).to(dtype)
    got = add_rms_norm_of_opposed(weight, 1e-5, weight.dtype)(opposed(x, signs_like(x)), None)
    wide = x.double()
    exact = wide / (wide.square().mean(-1, keepdim=True) + 1e-5).sqrt() * weight.double()
    assert got.is_contiguous()
    assert got.dtype == dtype
    torch.testing.assert_close(got.double(), exact, atol=1e-6, rtol=2 * torch.finfo(dtype).eps)


def test_adding_to_opposed_rows() -> None:
    torch.manual_seed(0)
    x, y = torch.randn(3, 8), torch.randn(3, 8)
    signs = signs_like(x)
    pairs = opposed(x, signs)
    normed = add_rms_norm_of_opposed(torch.ones(8), 1e-5, torch.float32)(pairs, y)
    torch.testing.assert_close(normed, rms_norm(x + y, torch.ones(8), 1e-5))
    torch.testing.assert_close(pairs, torch.stack([x + y, -(x + y)], dim=1))
