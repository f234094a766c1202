"""A head beside other features, over all kinds of models: the tokens of an engine without it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.engine.driving import num_drafts
from tests.engine.lora.test_lora_features import with_adapter, write_for
from tests.engine.speculation.eagle.heads import RandomHead
from tests.engine.test_combinations import MODELS, PLAIN, PROMPTS, SWAP, _byte_tokens, open_engine, run
from tests.engine.tiny_models import TINY_MODELS

pytestmark = pytest.mark.slow
__all__ = ["_byte_tokens"]  # a fixture that all tests here use
ALWAYS: dict[str, Any] = {"adaptive_drafts": False, "num_speculative_tokens": 3}


def head_for(folder: Path, hidden_size: int, num_layers: int) -> str:
    """Of a random model of whatever size; its drafts are right by chance."""
    changes = {"hidden_size": hidden_size, "eagle_aux_hidden_state_layer_ids": [0, 1, num_layers - 1]}
    return f"eagle:{RandomHead(changes, model_size=hidden_size).save(folder)}"


@pytest.mark.parametrize("name", MODELS)
def test_drafts_of_blocks_that_are_swapped(name: str, tmp_path: Path) -> None:
    """With a grammar and prompts' log-probabilities; experts, windows, latents, packed weights, GGUF."""
    save, settings, num_blocks = MODELS[name]
    path = save(tmp_path / "m")
    plain = open_engine(path, **settings)
    tokens, _ = run(plain)
    head = head_for(tmp_path / "head", plain.model_config.hidden_size, plain.model_config.num_layers)
    made = open_engine(path, **settings, **ALWAYS, **SWAP, speculative=head, num_gpu_blocks=num_blocks)
    found, _ = run(made)
    assert found == tokens
    assert num_drafts(made.engine)[0] > 20
    assert made.engine.load().num_preemptions > 0


@pytest.mark.wing("engine.lora")
def test_rows_of_adapters_and_of_the_model_itself(tmp_path: Path) -> None:
    """The head reads what an adapter has made of a row."""
    path, exact = TINY_MODELS["llama"].save(tmp_path / "m"), {"dtype": "float32", "quant_mode": "none"}
    plain = open_engine(path, **exact, enable_lora=True)
    adapter = write_for(tmp_path / "adapter", plain.model_config)
    head = head_for(tmp_path / "head", plain.model_config.hidden_size, plain.model_config.num_layers)
    answers, drafted = [], set[str]()
    made = open_engine(path, **exact, **ALWAYS, enable_lora=True, speculative=head)
    for parts in (plain, made):
        requests = [parts.engine.add_request(prompt, PLAIN) for prompt in PROMPTS]
        requests += [with_adapter(parts, adapter).engine.add_request(prompt, PLAIN) for prompt in PROMPTS]
        while parts.engine.has_work():
            step = parts.engine.step()
            assert not any(output.error for output in step.outputs)
            drafted |= {row.request_id for row in step.plan.rows if row.draft_token_ids}
        answers.append([request.output_token_ids for request in requests])
    assert answers[0] == answers[1]
    assert answers[0][:4] != answers[0][4:]
    assert drafted == {request.request_id for request in requests}
