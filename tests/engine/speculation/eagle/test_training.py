"""examples/train_eagle_head.py: a head that learns a small model's language drafts most of what it writes."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from common.model_files import resolve_model
from engine.config import EngineConfig
from engine.loader.load import load_model
from examples import train_eagle_head
from examples.train_eagle_head import Head, collect, most_common, train
from tests.engine.driving import answers, num_drafts
from tests.engine.speculation.opening import PLAIN, open_parts
from tests.engine.tiny_models import TINY_MODELS

pytestmark = pytest.mark.slow
FIRST, NUM_WORDS = 8, 48  # tokens of the language
MODES = (4, 5)  # a text begins with one of these, which says what follows each token of it
LAYERS = [0, 1, 2]
EXACT: dict[str, Any] = {"dtype": "float32", "quant_mode": "none", "num_threads": 1}


def text(mode: int, start: int, length: int) -> list[int]:
    order = torch.randperm(NUM_WORDS, generator=torch.Generator().manual_seed(mode)).tolist()
    found = [start]
    while len(found) < length:
        found.append(order[found[-1]])
    return [mode, *(FIRST + word for word in found)]


def trained_model() -> transformers.PreTrainedModel:
    """Train a small model of Llama's architecture to write the language."""
    model = TINY_MODELS["llama"].build()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    torch.manual_seed(0)
    for _ in range(80):
        starts = torch.randint(NUM_WORDS, (32,)).tolist()
        batch = torch.tensor([text(MODES[index % 2], start, 24) for index, start in enumerate(starts)])
        loss = model(batch, labels=batch).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return model.eval()


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[transformers.PreTrainedModel, Path, Path]:
    folder = tmp_path_factory.mktemp("trained")
    model = trained_model()
    model.save_pretrained(folder / "model")
    name = str(folder / "model")
    prompts = [text(mode, start, 2) for mode in MODES for start in range(0, NUM_WORDS, 2)]
    samples = collect(name, prompts, 32, LAYERS, 0.5, **EXACT)
    loaded = load_model(resolve_model(name), EngineConfig(name, device="cpu", dtype="float32", quant_mode="none"))
    head = Head(loaded, most_common(samples, 60))
    train(head, samples, 80, 8, 5e-3, 3)
    head.save(folder / "head", LAYERS)
    return model, folder / "model", folder / "head"


@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_a_trained_head_drafts_more_than_a_token_a_step(
    trained: tuple[transformers.PreTrainedModel, Path, Path], temperature: float
) -> None:
    """Tested on texts outside of the training data, with the model's own tokens."""
    _, model, head = trained
    plain = open_parts(model, quant_mode="none")
    made = open_parts(
        model, quant_mode="none", speculative=f"eagle:{head}", num_speculative_tokens=3, adaptive_drafts=False
    )
    params = replace(PLAIN, max_tokens=64, temperature=temperature, seed=7)
    prompts = [text(mode, start, 2) for mode in MODES for start in (1, 17, 33)]
    assert answers(plain.engine, prompts, params) == answers(made.engine, prompts, params)
    speculation = made.engine._scheduler.speculation
    assert speculation is not None
    tokens_a_step = 1 + speculation.num_accepted / speculation.num_rows
    print(f"{tokens_a_step:.2f} tokens a step")
    assert tokens_a_step > 2
    assert made.engine.num_steps < 0.6 * plain.engine.num_steps


@pytest.mark.parametrize("options", [[], ["--text=questions.txt"], ["--text=questions.txt", "--chat"]], ids=str)
def test_the_script_as_a_command(options: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """For a model with fewer layers than the paper's three."""
    monkeypatch.chdir(tmp_path)
    Path("questions.txt").write_text("What is tea?\n\nWhat is\ncoffee?\n")
    train_eagle_head.main(
        ["--model=dry-run", "--samples=3", "--length=12", "--steps=3", "--draft-vocab=40", "--out=head", *options]
    )
    assert json.loads(Path("head/config.json").read_text())["eagle_aux_hidden_state_layer_ids"] == [0, 1, 1]
    parts = open_parts(Path("dry-run"), speculative="eagle:head", adaptive_drafts=False)
    answers(parts.engine, [[1, 2, 3]], PLAIN)
    assert num_drafts(parts.engine)[0] > 0
