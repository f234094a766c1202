"""Features that are likely to be used together: answers equal those of an engine without the features that must not
change them. tests/compatibility.toml says which pairs are tested here.
"""

from __future__ import annotations

import gc
import json
from collections.abc import Callable
from itertools import chain
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest

from tests.engine.combinations import FLOAT32, MODELS, PLAIN, PROMPTS, SMALL_STEPS, SWAP, open_engine, run
from tests.engine.driving import answers
from tests.engine.expert_balancing.balancing import balancing_of
from tests.engine.gguf.gguf_files import write_gguf
from tests.engine.gguf.test_gguf import FAMILIES
from tests.engine.moe.test_moe import WIDE as WIDE_EXPERTS
from tests.engine.quantization.packed_files import FORMATS, write
from tests.engine.threaded_ranks import OF_RANKS, open_ranks, open_stages, place_experts
from tests.engine.tiny_models import TINY_MODELS

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("byte_tokens")]
DRAFTS: dict[str, Any] = {"num_speculative_tokens": 3, "adaptive_drafts": False}


@pytest.mark.parametrize("name", MODELS)
def test_drafts_over_8_bit_blocks_that_are_swapped(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save, settings, num_blocks = MODELS[name]
    path, settings = save(tmp_path / "m"), {**settings, "kv_cache_dtype": "fp8"}
    expected = run(open_engine(path, **settings))
    expected.draft(monkeypatch)
    made = open_engine(path, **DRAFTS, **settings, **SWAP, num_gpu_blocks=num_blocks)
    expected.check(made, near=5e-2, is_swapped=True)


def test_ranks_and_stages_with_drafts_and_8_bit_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    settings: dict[str, Any] = {"kv_cache_dtype": "fp8", "num_gpu_blocks": 64}
    expected = run(open_engine(Path("dry-run"), **FLOAT32, **settings))
    expected.draft(monkeypatch)
    settings |= {**SMALL_STEPS, "num_speculative_tokens": 3}
    expected.check(open_ranks(Path("dry-run"), 2, monkeypatch, itl_objective_ms=1000.0, **settings))
    expected.check(open_stages(Path("dry-run"), 2, monkeypatch, **settings))


def test_ranks_that_dispatch_to_placed_experts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Experts have replicas, the model has windows; with drafts, objectives, and swapped blocks."""
    save, settings, num_blocks = MODELS["windows and experts"]
    path = save(tmp_path / "m")
    expected = run(open_engine(path, **settings))
    expected.draft(monkeypatch)
    place_experts(monkeypatch, tmp_path / "loads.json", [[90, 1, 40, 5, 5, 9]] * 4)
    made = open_ranks(
        path, 2, monkeypatch, **DRAFTS, itl_objective_ms=1000.0, num_gpu_blocks=num_blocks, **SMALL_STEPS, **SWAP
    )
    expected.check(made, is_swapped=True)


@pytest.mark.parametrize("mode", ["int8-weight", "int4-weight"])
def test_ranks_of_placed_and_quantized_experts(mode: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Compares log-probabilities, because bfloat16 rounds sums over ranks once more."""
    path, settings = WIDE_EXPERTS.save(tmp_path / "m"), {"dtype": "bfloat16", "quant_mode": mode}
    expected = run(open_engine(path, **settings))
    place_experts(monkeypatch, tmp_path / "loads.json", [[90, 1, 40, 5]] * 3)
    parts = open_ranks(path, 2, monkeypatch, **settings)
    assert parts.loaded.quant_mode == mode
    pairs = zip(chain(*run(parts).logprobs), chain(*expected.logprobs), strict=True)
    assert 0 < fmean(abs(ours.logprob - theirs.logprob) for ours, theirs in pairs) < 0.05


def save_packed_experts(folder: Path) -> Path:
    write(FORMATS["gptq"], folder, WIDE_EXPERTS)
    return folder


def save_gguf_experts(folder: Path) -> Path:
    tiny, arch = FAMILIES["qwen3moe"]
    folder.mkdir()
    write_gguf(folder / "m.gguf", tiny.build(), arch)
    return folder / "m.gguf"


@pytest.mark.usefixtures("forked_followers")
@pytest.mark.parametrize(
    ("save", "settings"),
    [
        (TINY_MODELS["deepseek-v3"].save, {"kv_cache_dtype": "fp8"}),
        (TINY_MODELS["gpt-oss"].save, {}),
        (save_packed_experts, {}),
        (save_gguf_experts, {}),
    ],
    ids=["latents over 8-bit blocks", "windows", "packed", "gguf"],
)
def test_ranks_that_count_and_move_placed_experts(
    save: Callable[[Path], Path], settings: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Processes: the tokens of ranks whose experts stay where they were without counts. Without a grammar, for which
    the others would need the tokenizer, too.
    """
    path, loads, counted = save(tmp_path / "m"), tmp_path / "loads.json", tmp_path / "counted.json"
    monkeypatch.setattr("engine.expert_balancing.rebalancing.MIN_CHOICES_A_SLOT", 1)
    monkeypatch.setattr("engine.expert_balancing.rebalancing.MIN_GAIN", 1.0)
    base = {"tp": 2, "expert_parallel": True, "expert_exchange": "dispatch", **FLOAT32, **settings}

    def answer(**more: Any) -> tuple[list[list[int]], int]:
        """Return the tokens, and how often experts moved."""
        parts = open_engine(path, **base, **more)
        tokens, rebalancer = answers(parts.engine, PROMPTS, PLAIN), balancing_of(parts).rebalancer
        return tokens, rebalancer.num_changes if rebalancer else 0

    tokens, _ = answer(expert_load_file=str(loads))
    gc.collect()  # the counts are written when the engine ends
    placed = {"expert_placement": str(loads), "num_redundant_experts": 2, "expert_rebalance_interval": 3}
    found, num_changes = answer(**placed, expert_load_file=str(counted))
    assert found == tokens
    assert num_changes > 0
    gc.collect()
    assert json.loads(counted.read_text())["num_experts"] == json.loads(loads.read_text())["num_experts"]


def test_stages_of_whole_experts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two ranks each."""
    path = TINY_MODELS["qwen3-moe"].save(tmp_path / "m")
    expected = run(open_engine(path, **FLOAT32, kv_cache_dtype="fp8"))
    expected.draft(monkeypatch)
    monkeypatch.setitem(OF_RANKS, "expert_parallel", True)
    expected.check(open_stages(path, 2, monkeypatch, tp=2, **DRAFTS, kv_cache_dtype="fp8"), near=5e-2)
