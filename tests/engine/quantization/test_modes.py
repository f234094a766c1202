"""Modes of `--quant-mode`: which one a machine takes, when layers are quantized, and int8 layers of a CPU."""

from __future__ import annotations

import weakref
from pathlib import Path

import pytest
import torch
from torch import Tensor

from common.errors import ConfigError
from common.model_files import ModelFiles
from engine.config import EngineConfig
from engine.layers.linear import Linear
from engine.layers.weights import Partition
from engine.loader.random_weights import RandomWeights
from engine.quantization.conversion import resolve_quant_mode
from engine.quantization.cpu_linears import CpuLinears, int8, quantize_int8
from tests.engine.driving import open_model

DRY_RUN = ModelFiles("dry-run", "dry-run", Path())


def test_quant_mode_is_resolved_or_refused() -> None:
    cpu, gpu = torch.device("cpu"), torch.device("cuda", 0)
    auto = EngineConfig()
    assert resolve_quant_mode(auto, torch.bfloat16, cpu) == "int8-weight"
    assert resolve_quant_mode(auto, torch.bfloat16, cpu, has_int4=True) == "int4-weight"
    assert resolve_quant_mode(auto, torch.float32, cpu) == "none"
    assert resolve_quant_mode(auto, torch.bfloat16, gpu) == "none"
    with pytest.raises(ConfigError, match="int8-weight"):
        resolve_quant_mode(EngineConfig(quant_mode="int8-weight"), torch.float32, cpu)
    assert resolve_quant_mode(EngineConfig(quant_mode="int4-weight"), torch.bfloat16, cpu) == "int4-weight"


@pytest.mark.parametrize("mode", ["fp8", "w8a8"])
def test_rounded_activations_need_a_gpu(mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    config, gpu = EngineConfig(quant_mode=mode), torch.device("cuda")
    with pytest.raises(ConfigError, match="needs a GPU; on a CPU use int8-weight"):
        resolve_quant_mode(config, torch.bfloat16, torch.device("cpu"))
    with pytest.raises(ConfigError, match="needs --dtype bfloat16"):
        resolve_quant_mode(config, torch.float16, gpu)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (7, 5))
    with pytest.raises(ConfigError, match=r"this one has 7\.5; use int8-weight"):
        resolve_quant_mode(config, torch.bfloat16, gpu)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
    assert resolve_quant_mode(config, torch.bfloat16, gpu) == mode


def test_blocks_are_quantized_while_the_model_is_built(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before the last layer's weights are made, the first layer's are no longer held."""
    first: list[weakref.ref[Tensor]] = []
    plain_take = RandomWeights.take

    def take(self: RandomWeights, name: str, shape: tuple[int, ...], partition: Partition = Partition.NONE) -> Tensor:
        if name.startswith("model.layers.1."):
            assert all(each() is None for each in first)
        weight = plain_take(self, name, shape, partition)
        if name == "model.layers.0.mlp.down_proj.weight":
            first.append(weakref.ref(weight))
        return weight

    monkeypatch.setattr(RandomWeights, "take", take)
    open_model(DRY_RUN, dtype="bfloat16", quant_mode="int8-weight")
    assert first


def test_int8_rounding_is_within_half_a_step() -> None:
    weight = torch.randn(40, 64).bfloat16()
    weight[3] = 0
    quantized, scales = quantize_int8(weight)
    error = (quantized.float() * scales.float()[:, None] - weight.float()).abs()
    assert bool((error <= 0.51 * scales.float()[:, None]).all())
    assert int(quantized[3].abs().max()) == 0


@pytest.mark.parametrize("columns", [32, 40, 72])
def test_what_lies_behind_a_row_does_not_matter(columns: int) -> None:
    """torch's int8 GEMM reads beyond rows of x whose size is no multiple of 16: a NaN there became the result."""
    linear = CpuLinears(torch.bfloat16).of_plain(Linear(torch.randn(48, columns).bfloat16()))
    assert (linear.gemm is int8) == (columns % 16 == 0)
    for _ in range(50):
        freed = [torch.full((columns + more,), float("nan"), dtype=torch.bfloat16) for more in range(64)]
        del freed
        assert bool(linear(torch.randn(1, columns).bfloat16()).isfinite().all())
