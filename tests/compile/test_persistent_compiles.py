"""The persistent kernel of all layers compiles for an H200, and its ring of slots fits."""

from __future__ import annotations

import pytest

from benchmarks.kernels.persistent.random_decoder import RandomDecoder
from kernels.gpu.persistent.shape import Shape
from tests.compile import hopper
from tests.compile.hopper import NUM_SMS, SHARED_BYTES, Compiled


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> list[Compiled]:
    return hopper.install(monkeypatch)


def test_all_layers_of_qwen3_06b(compiled: list[Compiled]) -> None:
    shape = Shape(hidden=1024, heads=16, kv_heads=8, intermediate=3072, block_size=64, programs=NUM_SMS)
    assert shape.fits()
    decoder = RandomDecoder(shape, 2, 1024, "meta")
    decoder.kernel.step(*decoder.inputs(1000))
    [kernel] = compiled
    assert kernel.shared_bytes <= SHARED_BYTES
    assert kernel.spilled <= 64, "registers of a layer's loop went to memory"
