"""What the engine does around a model of transformers' code changes none of its tokens."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.engine.driving import num_drafts
from tests.engine.pooling.test_features import _byte_tokens, check, run
from tests.engine.test_combinations import SWAP, open_engine
from tests.engine.transformers_models.hf_families import FAMILIES

pytestmark = pytest.mark.slow
__all__ = ["_byte_tokens"]  # a fixture that all tests here use
ASKED: dict[str, Any] = {"model_impl": "transformers", "dtype": "float32"}


@pytest.mark.parametrize(("name", "num_blocks"), [("gpt_oss", 40), ("gpt_neox", 20)])
def test_drafts_swapped_blocks_and_a_prompt_budget_change_nothing(name: str, num_blocks: int, tmp_path: Path) -> None:
    """Beside vectors, log-probabilities of prompts, and a grammar."""
    tiny = FAMILIES[name]
    path = replace(tiny, changes={**tiny.changes, "vocab_size": 320}).save(tmp_path / name)
    expected = run(open_engine(path, **ASKED))
    drafts = {"num_speculative_tokens": 3, "ngram_min": 1, "itl_objective_ms": 5.0}
    parts = open_engine(path, num_gpu_blocks=num_blocks, **drafts, **SWAP, **ASKED)
    check(parts, *expected)
    assert parts.engine.load().num_preemptions > 0
    assert num_drafts(parts.engine)[0] > 0
