"""Engines whose decode attention rotates, against ones where another kernel does: the same tokens."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

import engine.assembly
import engine.gpu.forward
from engine.gpu.config import GpuConfig
from engine.speculation.drafts import Speculation
from kernels.gpu.rope_decode import rope_and_decode
from tests.engine.speculation.drafters import MakeOracle, knows
from tests.gpu.models import save_family, use_small_tiles
from tests.gpu.test_engine import PROMPTS, generate, greedy, open_gpu
from tests.gpu.test_kv_groups import BLOCK_SIZE, GEMMA3, GPT_OSS


@pytest.fixture
def rows(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Of each launch of the one kernel."""
    found: list[int] = []

    def recorded(qkv: Tensor, *args: Any, **options: Any) -> Tensor:
        found.append(qkv.shape[-3])
        return rope_and_decode(qkv, *args, **options)

    monkeypatch.setattr(engine.gpu.forward, "rope_and_decode", recorded)
    return found


@pytest.mark.parametrize(
    ("changes", "settings"),
    [({}, {}), ({}, {"kv_cache_dtype": "fp8"}), (GEMMA3, {}), (GPT_OSS, {})],
    ids=["qk-norm", "fp8-kv", "gemma3", "gpt-oss"],
)
def test_greedy_tokens_are_those_of_two_kernels(
    changes: dict[str, Any], settings: dict[str, Any], tmp_path: Path, rows: list[int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    use_small_tiles(monkeypatch, 2)
    model = save_family(tmp_path, changes)
    tokens = []
    for max_rows in (8, 0):
        monkeypatch.setattr(engine.gpu.forward, "MAX_ROPE_DECODE_ROWS", max_rows)
        rows.clear()
        made, _ = open_gpu(model, monkeypatch, GpuConfig(), block_size=BLOCK_SIZE, num_gpu_blocks=96, **settings)
        tokens.append(generate(made, greedy()))
        assert made.num_failed_steps == 0
        assert set(rows) >= {4} if max_rows else not rows
    assert tokens[0] == tokens[1]


def test_queries_of_one_sequence_are_rotated_before(
    tmp_path: Path, rows: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = save_family(tmp_path, {})
    made, _ = open_gpu(model, monkeypatch, GpuConfig())
    expected = generate(made, greedy(), PROMPTS[:2])
    assert rows
    rows.clear()
    answers = [prompt + tokens for prompt, tokens in zip(PROMPTS, expected, strict=False)]
    make_drafter = MakeOracle(knows(answers), 0.6, 97)
    monkeypatch.setattr(engine.assembly, "_speculation", lambda *_: Speculation(make_drafter, 3, 8))
    drafting, _ = open_gpu(model, monkeypatch, GpuConfig(), num_speculative_tokens=3, max_num_seqs=8)
    assert generate(drafting, greedy(), PROMPTS[:2]) == expected
    assert drafting.scheduler.num_accepted_tokens > 0
    assert not rows
