"""Ranks and stages of quantized checkpoints: the tokens of the weights that the files stand for, in less memory."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

import engine.loader.load
import engine.loader.packed_linears
from engine.layers.linear import Linear, LinearLayer
from engine.loader.packed_linears import Made
from engine.loader.quantized_rows import QuantizedRows
from tests.engine.packed_files import FORMATS, VOCAB_SIZE, write
from tests.engine.parallel.test_ranks import GREEDY, NUM_TOKENS, open_ranks
from tests.engine.tiny_models import reference_greedy

pytestmark = pytest.mark.slow
PROMPTS = [[(7 * i + 11 * j) % (VOCAB_SIZE - 8) + 8 for j in range(3 + 9 * i)] for i in range(3)]


class ExactMaker:
    """A `LinearMaker` of plain layers, in which nothing is rounded."""

    identity = "exact"
    quantizes_plain = False
    of_expert = None

    def of_rows(self, rows: QuantizedRows, bias: Tensor | None) -> Made | None:
        return Linear(rows.dequantize(torch.float32), bias), "exact"

    def int8(self, linear: Linear) -> LinearLayer:
        return linear


@pytest.fixture
def _exact(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine.loader.load, "can_keep_packed", lambda *_: True)
    monkeypatch.setattr(engine.loader.packed_linears, "_maker", lambda *_: ExactMaker())
    torch.set_num_threads(1)


@pytest.mark.usefixtures("_exact")
@pytest.mark.parametrize("name", FORMATS)
def test_two_ranks_of_every_format_equal_transformers(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    form = FORMATS[name]
    model = write(form, tmp_path / "m")
    parts = open_ranks(tmp_path / "m", 2, monkeypatch)
    assert parts.quantization == form.label
    requests = [parts.engine.add_request(prompt, GREEDY) for prompt in PROMPTS]
    while parts.engine.has_work():
        parts.engine.step()
    expected = [reference_greedy(model, prompt, NUM_TOKENS) for prompt in PROMPTS]
    assert [request.output_token_ids for request in requests] == expected
