"""The persistent kernel of all layers compiles for an H200, and its ring of slots fits."""

from __future__ import annotations

from typing import Any

import pytest
import triton

from benchmarks.kernels.persistent.random_decoder import RandomDecoder
from kernels.gpu.persistent.shape import SLOT_BYTES, Shape
from tests.compile import hopper
from tests.compile.hopper import NUM_SMS, SHARED_BYTES, Compiled
from tests.compile.test_compiles_for_hopper import OTHER_SETTINGS

EXPERTS = {"hidden": 2048, "heads": 32, "kv_heads": 4, "intermediate": 768, "experts": 128, "chosen": 8}
QWEN25_7B = {
    "hidden": 3584, "heads": 28, "kv_heads": 4, "intermediate": 18944, "has_qk_norms": False, "has_biases": True,
}  # fmt: skip
V2_LITE = {
    "hidden": 2048, "heads": 16, "kv_heads": 2, "intermediate": 1408, "experts": 64, "chosen": 8, "shared": 2,
    "dense_layers": 1, "normalizes": False, "is_latent": True, "has_qk_norms": False,
}  # fmt: skip


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> list[Compiled]:
    return hopper.install(monkeypatch)


@pytest.mark.parametrize(
    "sizes",
    [
        {"hidden": 1024, "heads": 16, "kv_heads": 8, "intermediate": 3072},
        pytest.param(EXPERTS, marks=OTHER_SETTINGS),
        {**EXPERTS, "is_e4m3": True},
        {**QWEN25_7B, "is_e4m3": True},
        pytest.param({"hidden": 5120, "heads": 40, "kv_heads": 8, "intermediate": 17408}, marks=OTHER_SETTINGS),
        V2_LITE,
    ],
    ids=["Qwen3-0.6B", "30B-A3B", "30B-A3B in e4m3", "Qwen2.5-7B in e4m3", "Qwen3-14B", "DeepSeek-V2-Lite"],
)
def test_all_layers(sizes: dict[str, Any], compiled: list[Compiled], monkeypatch: pytest.MonkeyPatch) -> None:
    """Also if an earlier engine of the process has enabled reports of late compiles."""
    reported: list[Any] = []
    monkeypatch.setattr(triton.knobs.runtime, "jit_cache_hook", lambda **told: reported.append(told))
    shape = Shape(**sizes, block_size=64, programs=NUM_SMS).tuned()
    assert shape.fits()
    decoder = RandomDecoder(shape, 2, 1024, "meta")
    decoder.kernel.compiler()()
    decoder.kernel.step(*decoder.inputs(1000))
    assert len(reported) == 1, "a step launches what was compiled ahead"
    [kernel] = compiled
    assert 0 <= shape.shared_bytes + shape.slots * SLOT_BYTES - kernel.shared_bytes < 1024
    assert kernel.shared_bytes <= SHARED_BYTES
    assert kernel.spilled <= 64, "registers of a layer's loop went to memory"
    num_used = 2 * shape.slots + (1 if shape.experts else 0)
    assert kernel.barriers == num_used, "an unused barrier's bytes get other data, which a context switch overwrites"
