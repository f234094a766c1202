"""A block of experts on a GPU, plain and of 8 bits, with shared experts or without, against the block itself."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from common.model_files import resolve_model
from engine.config import EngineConfig
from engine.gpu.ops.experts import StackedExperts, moe, moe_of_row
from engine.gpu.quantized import EightBitLinear, Fp8Linear, W8A8Linear
from engine.layers.linear import Linear
from engine.layers.moe import Moe
from engine.loader import load_model
from kernels.gpu.split_k import SplitKWorkspace
from kernels.rms_norm import rms_norm
from tests.gpu.models import save_family, save_tiny_model, use_small_tiles
from tests.gpu.test_latents import V3
from tests.kernels.helpers import relative_error

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


def load_block(folder: Path, has_shared: bool) -> Moe:
    saved = save_family(folder, V3) if has_shared else save_tiny_model(folder, inner=32, num_experts=4)
    loaded = load_model(resolve_model(str(saved)), EngineConfig(str(saved), dtype="float32"), DEVICE)
    return next(block for block in loaded.model.blocks if isinstance(block, Moe))


def test_experts_are_stacked_once(tmp_path: Path) -> None:
    """A second time, they would be without the shared ones, which the block has given away."""
    block = load_block(tmp_path, has_shared=True)
    assert StackedExperts.of(block).num_shared == 2
    assert StackedExperts.of(block) is StackedExperts.of(block)


def quantize(block: Moe, kind: type[EightBitLinear]) -> None:
    """Make the weights of the layers, which copies of the block have too, what 8 bits hold."""
    for ref in block.linears():
        assert isinstance(ref.layer, Linear)
        layer = kind.of(ref.layer, SplitKWorkspace(DEVICE))
        ref.layer.weight = layer.weight.float() * layer.scales[:, None]
        ref.replace(layer)


@pytest.mark.parametrize(
    ("num_tokens", "has_shared", "kind"),
    [(1, False, Fp8Linear), (3, True, None), (3, True, W8A8Linear), (40, False, W8A8Linear)],
)
def test_equals_the_block(
    num_tokens: int, has_shared: bool, kind: type[EightBitLinear] | None, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    use_small_tiles(monkeypatch, 12)
    block = load_block(tmp_path, has_shared)
    served = block.copy()
    if kind is not None:
        quantize(served, kind)
    residual = torch.randn(num_tokens, block.norm.shape[0], device=DEVICE)
    x = rms_norm(residual, block.norm, block.eps)
    expected = block(x, None)  # type: ignore[arg-type]  # experts need nothing of a step
    experts = StackedExperts(served)
    router = Linear(block.router)
    partials = moe(served, experts, router)(x, None)  # type: ignore[arg-type]
    assert partials is not None
    assert relative_error(partials.sum(dim=0), expected) < 2e-6
    if num_tokens == 1:
        before = residual.clone()
        moe_of_row(served, experts, lambda row: router(rms_norm(row, block.norm, block.eps)))(residual)
        assert relative_error(residual - before, expected) < 1e-5
