"""Steps of the persistent kernel on a Hopper against torch, and models that it does not support."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from benchmarks.kernels.persistent.random_decoder import RandomDecoder
from kernels.gpu.persistent.shape import Shape

HAS_HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)
QWEN3_06B = Shape(hidden=1024, heads=16, kv_heads=8, intermediate=3072, block_size=64, programs=132)
QWEN25_7B = {
    "hidden": 3584,
    "heads": 28,
    "kv_heads": 4,
    "intermediate": 18944,
    "has_qk_norms": False,
    "has_biases": True,
}
EXPERTS = {"hidden": 2048, "heads": 32, "kv_heads": 4, "intermediate": 768, "experts": 128, "chosen": 8}
V2_LITE = {
    "hidden": 2048,
    "heads": 16,
    "kv_heads": 2,
    "intermediate": 1408,
    "experts": 64,
    "chosen": 8,
    "normalizes": False,
    "shared": 2,
    "dense_layers": 1,
    "is_latent": True,
    "has_qk_norms": False,
}


@pytest.mark.skipif(not HAS_HOPPER, reason="needs a Hopper: Gluon has no interpreter")
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"block_size": 16},
        {"hidden": 2048, "intermediate": 6144},
        EXPERTS,
        {"is_e4m3": True},
        {"hidden": 2560, "heads": 32, "intermediate": 9728, "is_e4m3": True},
        {**EXPERTS, "is_e4m3": True},
        {"heads": 24},
        QWEN25_7B,
        {**QWEN25_7B, "is_e4m3": True},
        {"hidden": 4096, "heads": 32, "intermediate": 14336, "has_qk_norms": False, "block_size": 16},
        {**QWEN25_7B, "hidden": 1536, "heads": 12, "kv_heads": 2, "intermediate": 8960},
        {"hidden": 5120, "heads": 40, "kv_heads": 10, "intermediate": 17920, "has_qk_norms": False},
        V2_LITE,
        {**V2_LITE, "block_size": 16, "normalizes": True, "heads": 8, "kv_heads": 1},
        {**EXPERTS, "hidden": 4096, "heads": 64, "kv_heads": 8, "intermediate": 1536},
    ],
    ids=[
        "Qwen3-0.6B",
        "blocks of 16",
        "1.7B",
        "30B-A3B",
        "0.6B in e4m3",
        "4B in e4m3",
        "30B-A3B in e4m3",
        "a group of 3",
        "Qwen2.5-7B",
        "7B in e4m3",
        "Llama-3.1-8B",
        "Qwen2.5-1.5B",
        "Phi-4",
        "DeepSeek-V2-Lite",
        "8 latent heads",
        "235B-A22B",
    ],
)
def test_steps_equal_torchs(changes: dict[str, int]) -> None:
    """A step must not read words of the previous one; later steps see K and V that earlier ones stored."""
    torch.manual_seed(0)
    programs = torch.cuda.get_device_properties(0).multi_processor_count
    shape = dataclasses.replace(QWEN3_06B, programs=programs, **changes).tuned()  # type: ignore[arg-type]  # no bool is there
    block_size = shape.block_size
    decoder = RandomDecoder(shape, 3, 1000, "cuda")
    for num_keys in (1, 63, 64, 65, 500, 1000, 2, 1000):
        inputs = decoder.inputs(num_keys)
        block, offset = divmod(int(inputs[3]), block_size)
        before = decoder.pool.clone()
        want = decoder.reference(num_keys)
        stored = decoder.pool[block, :, :, :, offset].float()
        decoder.pool.copy_(before)
        got = decoder.kernel.step(*inputs).float()
        assert float((got - want).norm() / want.norm()) < 2.0**-8
        of_token = decoder.pool[block, :, :, :, offset]
        assert float((of_token.float() - stored).norm() / stored.norm()) < 2.0**-8
        of_token.copy_(before[block, :, :, :, offset])
        assert torch.equal(decoder.pool, before), "it writes the token's K and V alone"
        of_token.copy_(stored)


@pytest.mark.skipif(not HAS_HOPPER, reason="needs a Hopper: Gluon has no interpreter")
def test_a_row_of_nobody_stores_nothing() -> None:
    decoder = RandomDecoder(QWEN3_06B, 2, 100, "cuda")
    before = decoder.pool.clone()
    assert decoder.kernel.step(*decoder.inputs(0)).isfinite().all()
    assert torch.equal(decoder.pool, before)


@pytest.mark.parametrize(
    "changes",
    [
        {"hidden": 8192, "heads": 64, "intermediate": 28672},
        {"hidden": 512},
        {"heads": 128},
        {"block_size": 128},
        {"heads": 8, "kv_heads": 1},
        {"hidden": 1088},
        {"experts": 32, "chosen": 8},
        {**EXPERTS, "hidden": 4096, "heads": 64, "kv_heads": 8, "intermediate": 1536, "is_e4m3": True},
        {**V2_LITE, "heads": 32, "kv_heads": 4},
        {**V2_LITE, "is_e4m3": True},
        {**EXPERTS, "dense_layers": 1, "is_e4m3": True},
    ],
    ids=[
        "Llama-3.3-70B",
        "less than a chunk",
        "a group of 16",
        "blocks of 128",
        "one KV head",
        "odd",
        "32 experts",
        "long rows of experts' W_down in e4m3",
        "32 latent heads",
        "V2-Lite in e4m3",
        "a dense layer cut into experts, whose scales are not",
    ],
)
def test_models_that_do_not_fit(changes: dict[str, int]) -> None:
    assert QWEN3_06B.fits()
    assert not dataclasses.replace(QWEN3_06B, **changes).tuned().fits()  # type: ignore[arg-type]  # which has a bool, too


@pytest.mark.parametrize(
    ("changes", "halves"),
    [({}, 3), ({**EXPERTS, "is_e4m3": True}, 5), ({**QWEN25_7B, "is_e4m3": True}, 5), (QWEN25_7B, 6)],
    ids=["two whole stages in the ring", "30B-A3B in e4m3", "7B in e4m3", "Qwen2.5-7B"],
)
def test_loads_on_their_way(changes: dict[str, int], halves: int) -> None:
    """As many as were fastest on an H200 (docs/performance_log.md), with all slots that fit into shared memory."""
    tuned = dataclasses.replace(QWEN3_06B, **changes).tuned()  # type: ignore[arg-type]  # which has a bool, too
    assert (tuned.slots, tuned.halves_ahead) == (12, halves)
