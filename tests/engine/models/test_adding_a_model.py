"""docs/extending.md is true: the model file that it tells the reader to write equals transformers'."""

from __future__ import annotations

import re
import runpy
from pathlib import Path

import pytest
import torch

from engine.models import registry
from tests.engine.driving import directory, generate, open_model, random_prompt
from tests.engine.tiny_models import VOCAB_SIZE, TinyModel, reference_greedy, reference_logits

pytestmark = pytest.mark.slow

PAGE = Path(__file__).parents[3] / "docs/extending.md"
TINY = TinyModel("SeedOss", {"head_dim": 8, "attention_bias": True, "attention_out_bias": True, "mlp_bias": True})


@pytest.fixture
def _written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "FAMILIES", dict(registry.FAMILIES))
    blocks = re.findall(r"^```python\n(.*?)^```", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    assert len(blocks) == 1
    (tmp_path / "family.py").write_text(blocks[0])
    runpy.run_path(str(tmp_path / "family.py"))


@pytest.mark.usefixtures("_written")
def test_the_family_on_the_page_equals_transformers(tmp_path: Path) -> None:
    loaded, config = open_model(directory(TINY.save(tmp_path / "model")), dtype="float32")
    reference = TINY.build()
    prompt = random_prompt(30, VOCAB_SIZE, 1)
    tokens, logits = generate(loaded, config, prompt, 5, chunk=13)
    assert tokens == reference_greedy(reference, prompt, 5)
    expected = reference_logits(reference, prompt + tokens)[len(prompt) - 1 : -1]
    torch.testing.assert_close(logits, expected, atol=1e-4, rtol=0)
