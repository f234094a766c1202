"""Ranks of quantized checkpoints with the layers of a GPU: outputs add up to the whole model's, in less memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from engine.config import EngineConfig, Stage
from engine.layers.linear import Linear
from engine.layers.mlp import Mlp
from engine.loader.load import LoadedModel, load_model
from engine.moe.expert_stacks import StackedExperts
from engine.moe.gpu_experts import moe
from engine.moe.moe import Moe
from engine.quantization import conversion
from engine.quantization.gpu_linears import GpuLinears, stored
from kvstore.layout import Shard
from tests.engine.driving import directory
from tests.engine.quantization.packed_files import FORMATS, SIZES, write
from tests.engine.tiny_models import DEEPSEEK, TinyModel
from tests.gpu.models import use_small_tiles
from tests.gpu.moe.test_packed_experts import ATTENTION, CHECKPOINTS, save_mxfp4
from tests.gpu.quantization.test_packed_checkpoints import DEVICE, ONE_LAYER
from tests.gpu.test_engine import ON_GPU
from tests.kernels.helpers import relative_error

LINEARS = {
    "gptq": "4 int4",
    "gptq-act-order": "1 int4, 3 int4 reordered",
    "gptq-8bit": "4 int8 of other groups",
    "awq": "4 int4",
    "fp8-blocks": "4 e4m3 of blocks",
    "fp8-tensor": "4 e4m3",
    "compressed-int8": "4 int8",
    "compressed-int4-asymmetric": "4 int4",
}
WIDE = TinyModel("Qwen2", {**ONE_LAYER.changes, "hidden_size": 128, "intermediate_size": 256})
SERVED = [*LINEARS] if ON_GPU else ["gptq-act-order", "awq", "fp8-tensor", "compressed-int8"]


def load(path: Path, shard: Shard, stage: Stage | None = None, **settings: Any) -> LoadedModel:
    config = EngineConfig(str(path), device=DEVICE.type, num_gpu_blocks=64, tp=shard.size, **settings)
    return load_model(directory(path), config, DEVICE, shard, stage=stage)


def num_bytes(layers: Sequence[Linear]) -> int:
    held = [each for layer in layers for each in (layer.weight, layer.scales) if each is not None]
    return sum(tensor.nbytes for tensor in held)


def layers_of(loaded: LoadedModel) -> list[Linear]:
    return [ref.layer for ref in loaded.model.linears() if ref.attribute != "head"]


def mlp_of(loaded: LoadedModel) -> Mlp:
    return next(block for block in loaded.model.blocks if isinstance(block, Mlp))


def experts_of(loaded: LoadedModel) -> list[Moe]:
    return [block for block in loaded.model.blocks if isinstance(block, Moe)]


def output_of(block: Moe, x: Tensor) -> Tensor:
    experts = StackedExperts(block)
    output = moe(block, experts, Linear(block.router.to(x.dtype), block.router_bias), is_summed=True)(x, None)  # type: ignore[arg-type]
    assert isinstance(output, Tensor)
    return output


@pytest.mark.parametrize("name", SERVED)
def test_ranks_keep_linear_layers_packed(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """One row of x: the interpreter multiplies matrices of bfloat16 by their bit patterns."""
    write(FORMATS[name], tmp_path / "m", WIDE)
    exact = load(tmp_path / "m", Shard(), dtype="float32", quant_mode="none")
    monkeypatch.setattr(conversion, "linears_of", lambda _dtype, device: GpuLinears(device))
    whole = load(tmp_path / "m", Shard(), dtype="bfloat16")
    with caplog.at_level("INFO"):
        ranks = [load(tmp_path / "m", Shard(rank, 2), dtype="bfloat16") for rank in range(2)]
    assert LINEARS[name] in caplog.text
    assert {rank.quant_mode for rank in ranks} == {whole.quant_mode} == {FORMATS[name].label}
    assert {rank.fingerprint for rank in ranks} == {whole.fingerprint}
    if name != "gptq-act-order":  # whose groups are filled up
        assert num_bytes(layers_of(ranks[0])) / num_bytes(layers_of(whole)) < 0.53
    x = torch.randn(1, 128, generator=torch.Generator().manual_seed(1)).to(DEVICE)
    parts = [mlp_of(rank)(x.bfloat16(), None) for rank in ranks]  # type: ignore[arg-type]
    expected = mlp_of(exact)(x, None)  # type: ignore[arg-type]
    assert relative_error(torch.stack(parts).float().sum(0), expected) < (0.1 if "fp8" in name else 0.03)


@pytest.mark.parametrize(("inner", "has_whole"), [(160, False), (64, True)])
@torch.inference_mode()
def test_ranks_keep_mxfp4_experts(
    inner: int, has_whole: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """160 columns: each rank has two and a half groups of columns."""
    use_small_tiles(monkeypatch, 2)
    torch.manual_seed(0)
    path = save_mxfp4(tmp_path, inner)
    (exact, *_) = experts_of(load(path, Shard(), dtype="float32"))
    monkeypatch.setattr(conversion, "can_keep_on_gpu", lambda *_: True)  # in float32, where nothing is rounded
    x = torch.randn(5, 64, generator=torch.Generator().manual_seed(1)).to(DEVICE)
    found, sizes = torch.zeros_like(x), []
    for rank in range(2):
        loaded = load(path, Shard(rank, 2), dtype="float32", expert_parallel=has_whole)
        (block, *_) = experts_of(loaded)
        layers = [layer for expert in block.experts.values() for layer in (expert.gate_up, expert.down)]
        assert all(layer.gemm is stored for layer in layers)
        sizes.append(num_bytes(layers))
        found += output_of(block, x)
    torch.testing.assert_close(found, exact(x, None), atol=1e-4, rtol=1e-4)  # type: ignore[arg-type]
    assert sizes[0] == sizes[1]
    filled = 128  # columns, of 64 and of 80 or 64
    assert sizes[0] <= 4 * (2 * filled + 64) * filled * (0.5 + 1 / 32) // (2 if has_whole else 1)


def test_stages_keep_mxfp4_experts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = save_mxfp4(tmp_path)
    monkeypatch.setattr(conversion, "can_keep_on_gpu", lambda *_: True)
    for index in range(2):
        loaded = load(path, Shard(), Stage(index, 2), dtype="float32", pp=2)
        (block,) = experts_of(loaded)
        assert all(expert.down.gemm is stored for expert in block.experts.values())


@torch.inference_mode()
def test_shared_experts_are_stacked_with_those_of_a_rank(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank has 48 columns of each expert, and 96 of two shared ones as one, in groups of 32."""
    use_small_tiles(monkeypatch, 2)
    sizes = {"moe_intermediate_size": 96, "n_shared_experts": 2, "n_group": 2, "topk_group": 1, "kv_lora_rank": 64}
    tiny = TinyModel("DeepseekV3", {**SIZES, **DEEPSEEK, **sizes, "q_lora_rank": 64, "num_key_value_heads": 4})
    form = replace(CHECKPOINTS["fp8 in blocks"], kept_plain=(*ATTENTION, "_proj_with_mqa", "q_b_proj", "kv_b_proj"))
    write(form, tmp_path / "m", tiny)
    (exact, *_) = experts_of(load(tmp_path / "m", Shard(), dtype="float32"))
    monkeypatch.setattr(conversion, "can_keep_packed", lambda *_: True)  # in float32
    monkeypatch.setattr(conversion, "linears_of", lambda _dtype, device: GpuLinears(device))
    x = torch.randn(5, 64, generator=torch.Generator().manual_seed(1)).to(DEVICE)
    found = torch.zeros_like(x)
    for rank in range(2):
        (block, *_) = experts_of(load(tmp_path / "m", Shard(rank, 2), dtype="float32"))
        assert block.experts[0].down.gemm is stored
        found += output_of(block, x)
    torch.testing.assert_close(found, exact(x, None), atol=1e-4, rtol=1e-4)  # type: ignore[arg-type]
