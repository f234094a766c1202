"""Adapters beside other features of an engine, over all kinds of models: the tokens of an engine without those."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest

from common.lora.adapter_ref import AdapterRef
from engine.assembly import EngineParts
from engine.models.config import ModelConfig
from tests.engine.driving import num_drafts
from tests.engine.pooling.test_features import LONG, check, run
from tests.engine.speculation.drafters import MakeOracle, draft_with, knows
from tests.engine.test_combinations import MODELS, PROMPTS, SWAP, _byte_tokens, open_engine
from tests.engine.tiny_models import VOCAB_SIZE
from tests.harness.adapters import shapes_of_config, write_adapter

pytestmark = [pytest.mark.slow, pytest.mark.wing("engine.lora")]
__all__ = ["_byte_tokens"]  # a fixture that all tests here use


def write_for(folder: Path, config: ModelConfig) -> str:
    """An adapter of every layer that adapters of the model may change, but the output projection."""
    return str(AdapterRef.of(write_adapter(folder, shapes_of_config(config), ("_proj",), std=0.25)))


def with_adapter(parts: EngineParts, name: str) -> EngineParts:
    """The engine, where every request names the adapter."""
    parts.engine.add_request = partial(parts.engine.add_request, adapter=name)  # type: ignore[method-assign]
    return parts


@pytest.mark.parametrize("name", MODELS)
def test_with_drafts_swapped_blocks_and_a_prompt_budget(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save, settings, num_blocks = MODELS[name]
    path, lora = save(tmp_path / "m"), {**settings, "enable_lora": True}
    plain = open_engine(path, **settings)
    adapter = write_for(tmp_path / "adapter", plain.model_config)
    vectors, tokens = run(with_adapter(open_engine(path, **lora), adapter))
    assert tokens[:3] != run(plain)[1][:3]
    answers = [prompt + each for prompt, each in zip([*PROMPTS, LONG], tokens, strict=True)]
    draft_with(monkeypatch, MakeOracle(knows(answers), 0.7, VOCAB_SIZE))
    features: dict[str, Any] = {"num_speculative_tokens": 3, "adaptive_drafts": False, "itl_objective_ms": 1000.0}
    made = open_engine(path, **lora, **SWAP, **features, num_gpu_blocks=2 * num_blocks)
    check(with_adapter(made, adapter), vectors, tokens, near=5e-2)
    assert num_drafts(made.engine)[1] > 0
    assert made.engine.load().num_preemptions > 0
