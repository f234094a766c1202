"""A block of experts on a GPU, plain and quantized, with shared experts or without, against the block itself."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from common.model_files import resolve_model
from engine.config import EngineConfig, GpuConfig
from engine.few_rows.partials import Partials
from engine.layers.linear import Linear
from engine.loader.load import load_model
from engine.moe.expert_stacks import StackedExperts, prepare, stackable, stacked_of
from engine.moe.gpu_experts import moe, moe_of_row
from engine.moe.moe import Moe
from engine.quantization.gpu_linears import (
    FP8,
    W8A8,
    W8A16,
    EightBit,
    dequantized,
    stored,
    stored_layer,
    w4a16,
    w4a16_layer,
)
from engine.quantization.int4 import quantize_int4
from kernels.elementwise import rms_norm
from kernels.gpu.few_rows.split_k import SplitKWorkspace
from kernels.quantization.mxfp4 import pack_mxfp4
from kernels.quantization.w4a16_gemm import dequantize_w4, pack_w4
from tests.gpu.mla.test_latents import V3
from tests.gpu.models import save_family, save_tiny_model, use_small_tiles
from tests.gpu.test_engine import generate, greedy, open_gpu, reference
from tests.kernels.helpers import INT4_FLOAT32_BOUND, relative_error

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
QWEN2_MOE = {
    "architectures": ["Qwen2MoeForCausalLM"], "model_type": "qwen2_moe", "num_experts": 4, "num_experts_per_tok": 2,
    "moe_intermediate_size": 32, "shared_expert_intermediate_size": 64,
}  # fmt: skip

Kind = EightBit | Callable[[Linear, Tensor], Tensor]


def load_block(folder: Path, has_shared: bool, inner: int = 32, hidden: int = 64) -> Moe:
    if has_shared:
        saved = save_family(folder, {**V3, "hidden_size": hidden, "moe_intermediate_size": inner})
    else:
        saved = save_tiny_model(folder, inner=inner, hidden=hidden, num_experts=4)
    return first_experts(saved)


def first_experts(saved: Path) -> Moe:
    loaded = load_model(resolve_model(str(saved)), EngineConfig(str(saved), dtype="float32"), DEVICE)
    return next(block for block in loaded.model.blocks if isinstance(block, Moe))


def test_experts_are_stacked_once(tmp_path: Path) -> None:
    """A second stack would lack the shared experts, which the block no longer has."""
    block = load_block(tmp_path, has_shared=True)
    prepare(block)
    stacked = stacked_of(block)
    prepare(block)
    assert stacked_of(block) is stacked
    assert stacked.num_shared == 2


def quantize(block: Moe, kind: Kind) -> None:
    """Round the layers' weights, which copies of the block share, to 8 or 4 bits."""
    workspace = SplitKWorkspace(DEVICE)
    for ref in block.linears():
        if kind is stored:
            blocks = torch.randint(0, 256, (*ref.layer.weight.shape, 16), device=DEVICE)[:, ::32].to(torch.uint8)
            exponents = torch.randint(121, 125, blocks.shape[:2], device=DEVICE).to(torch.uint8)
            made = stored_layer(*pack_mxfp4(blocks, exponents), num_columns=ref.layer.weight.shape[1])
            ref.layer.weight = dequantized(made, torch.float32)
            ref.replace(made)
        elif kind is w4a16:
            rows = quantize_int4(ref.layer.weight)
            packed = pack_w4(rows.values, rows.scales, rows.offsets_or_zeros())
            ref.layer.weight = dequantize_w4(packed, torch.float32)
            ref.replace(w4a16_layer(packed, None, workspace))
        else:
            assert isinstance(kind, EightBit)
            layer = kind.of(ref.layer, workspace)
            ref.layer.weight = dequantized(layer, torch.float32)
            ref.replace(layer)


@pytest.mark.parametrize(
    ("num_tokens", "has_shared", "kind", "inner"),
    [
        (1, False, FP8, 32), (3, True, None, 32), (3, True, W8A8, 32), (40, False, W8A8, 32),
        (1, False, w4a16, 64), (3, True, w4a16, 64), (8, True, w4a16, 64),
        (20, False, w4a16, 128), (1, False, stored, 128), (20, False, stored, 128),
    ],
)  # fmt: skip
def test_equals_the_block(
    num_tokens: int, has_shared: bool, kind: Kind | None, inner: int, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    use_small_tiles(monkeypatch, 12)
    block = load_block(tmp_path, has_shared, inner)
    served = block.copy()
    if kind is not None:
        quantize(served, kind)
    residual = torch.randn(num_tokens, block.norm.shape[0], device=DEVICE)
    check_block(block, served, residual, INT4_FLOAT32_BOUND if kind is w4a16 else 2e-6)


def test_many_tokens_of_one_choice_each_equal_the_block(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Few pairs, but of more tokens than an unsorted tile holds."""
    use_small_tiles(monkeypatch, 32)
    block = first_experts(save_tiny_model(tmp_path, inner=32, num_experts=4, num_choices=1))
    check_block(block, block.copy(), torch.randn(20, block.norm.shape[0], device=DEVICE), 2e-6)


@pytest.mark.parametrize("num_tokens", [1, 3, 40])
def test_a_gated_shared_expert_equals_the_block(
    num_tokens: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    use_small_tiles(monkeypatch, 12)
    block = first_experts(save_family(tmp_path, QWEN2_MOE))
    assert block.shared_gate is not None
    check_block(block, block.copy(), torch.randn(num_tokens, block.norm.shape[0], device=DEVICE), 2e-6)


def test_tokens_of_gated_shared_experts_equal_those_of_the_plain_engine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    use_small_tiles(monkeypatch, 4)
    model = save_family(tmp_path, QWEN2_MOE)
    expected = generate(reference(model), greedy())
    made, _ = open_gpu(model, monkeypatch, GpuConfig(), max_num_batched_tokens=16)
    assert generate(made, greedy()) == expected


def check_block(block: Moe, served: Moe, residual: Tensor, bound: float) -> None:
    x = rms_norm(residual, block.norm, block.eps)
    expected = block(x, None)  # type: ignore[arg-type]  # experts do not use a step
    experts = StackedExperts(served)
    router = Linear(experts.router)
    partials = moe(served, experts, router)(x, None)  # type: ignore[arg-type]
    assert isinstance(partials, Partials)
    assert relative_error(partials.values.sum(dim=0), expected) < bound
    if residual.shape[0] == 1:
        before = residual.clone()
        moe_of_row(served, experts, lambda row: router(rms_norm(row, block.norm, block.eps)))(residual, None)  # type: ignore[arg-type]
        assert relative_error(residual - before, expected) < 2e-5


@pytest.mark.parametrize(("columns", "piece"), [(96, None), (128, 32)])
def test_groups_that_no_kernel_takes_become_int8(columns: int, piece: int | None) -> None:
    rows = quantize_int4(torch.randn(16, columns, device=DEVICE))
    layer = w4a16_layer(pack_w4(rows.values, rows.scales, rows.offsets_or_zeros()), None, SplitKWorkspace(DEVICE))
    made = stackable(layer, piece)
    assert made.gemm is W8A16
    exact = dequantized(layer, torch.float32)
    assert relative_error(dequantized(made, torch.float32), exact) < 1e-2
