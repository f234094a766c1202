"""Two ranks of a quantized checkpoint in the forms of a GPU's tensor parallelism: the hidden states of one rank."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from torch import Tensor

from engine.config import EngineConfig
from engine.gpu.attention.backend import GpuInputs
from engine.gpu.forward import FusedForward
from engine.loader.load import load_model
from engine.quantization import conversion
from engine.quantization.gpu_linears import GpuLinears, QuantizedInput
from kernels.gpu.elementwise.rms_norm import add_rms_norm
from kernels.gpu.quantization.quantize import add_rms_norm_quantize
from kvstore.layout import Shard
from tests.engine.driving import directory
from tests.engine.quantization.packed_files import FORMATS, write
from tests.gpu.models import use_small_tiles
from tests.gpu.moe.test_packed_experts import DequantizingLinears, save_mxfp4
from tests.gpu.quantization.test_packed_checkpoints import DEVICE
from tests.gpu.quantization.test_packed_ranks import WIDE
from tests.gpu.test_engine import ON_GPU
from tests.gpu.test_lowering import first_step
from tests.kernels.helpers import relative_error


class Turns:
    """A group of threads that run one at a time, until each waits for the others' parts of a sum."""

    rows = None

    def __init__(self, size: int) -> None:
        self.size = size
        self._turn = threading.Lock()
        self._barrier = threading.Barrier(size, timeout=200.0)
        self._parts: dict[int, Tensor] = {}

    def summed(self, rank: int, part: Tensor) -> Tensor:
        self._parts[rank] = part
        self._turn.release()
        self._barrier.wait()
        total = torch.stack([self._parts[each].float() for each in range(self.size)]).sum(0).to(part.dtype)
        self._barrier.wait()
        self._turn.acquire()
        return total

    def run(self, rank: int, forward: FusedForward, inputs: GpuInputs) -> Tensor:
        with self._turn, torch.inference_mode():
            return forward.hidden(inputs)


class Rank:
    """The parts of a `DeviceGroup` that the forms need."""

    rows = None

    def __init__(self, group: Turns, rank: int) -> None:
        self._group, self.rank, self.size = group, rank, group.size

    def all_reduce_rms_norm(self, pending: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
        return add_rms_norm(self._group.summed(self.rank, pending), residual, weight, eps)

    def all_reduce_rms_norm_quantize(
        self, pending: Tensor, residual: Tensor, weight: Tensor, eps: float, dtype: torch.dtype, num_planes: int
    ) -> QuantizedInput:
        pending = self._group.summed(self.rank, pending)
        return add_rms_norm_quantize(pending, residual, weight, eps, dtype, num_planes)


def make_forward(path: Path, shard: Shard, rows: int, group: Rank | None) -> tuple[FusedForward, GpuInputs]:
    config = EngineConfig(str(path), device=DEVICE.type, dtype="float32", tp=shard.size).resolved(DEVICE.type)
    loaded = load_model(directory(path), config, DEVICE, shard)
    return first_step(loaded, config, rows, group)


@pytest.mark.parametrize("name", ["gptq-act-order", "compressed-int8"])
def test_two_ranks_compute_the_hidden_states_of_one(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In float32. int8 inputs of `o_proj` and `down` are quantized rank by rank; int4 takes long to interpret."""
    make = GpuLinears if ON_GPU or name == "compressed-int8" else DequantizingLinears
    write(FORMATS[name], tmp_path / "m", WIDE)
    monkeypatch.setattr(conversion, "can_keep_packed", lambda *_: True)
    monkeypatch.setattr(conversion, "linears_of", lambda _dtype, device: make(device))
    check(tmp_path / "m", 0.03 if name == "compressed-int8" else 1e-4)


def test_two_ranks_of_mxfp4_experts_compute_the_hidden_states_of_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each has two and a half groups of columns of every expert."""
    use_small_tiles(monkeypatch, 2)
    torch.manual_seed(0)
    save_mxfp4(tmp_path, inner=160)
    monkeypatch.setattr(conversion, "can_keep_on_gpu", lambda *_: True)
    check(tmp_path, 1e-4)


def check(path: Path, bound: float) -> None:
    rows, group = 3, Turns(2)
    forward, inputs = make_forward(path, Shard(), rows, None)
    with torch.inference_mode():
        expected = forward.hidden(inputs)
    forwards = [make_forward(path, Shard(rank, 2), rows, Rank(group, rank)) for rank in range(2)]
    with ThreadPoolExecutor(2) as executor:
        first, second = executor.map(lambda rank: group.run(rank, *forwards[rank]), range(2))
    assert torch.equal(first, second)
    assert relative_error(first, expected) < bound
