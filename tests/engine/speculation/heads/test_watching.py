"""A proposer gets the inputs of layers that it names, in every lowered form of a model."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from torch import Tensor

from engine.cpu.forward import CpuForward
from engine.models.model import Model
from engine.plan import ScheduledRow
from engine.request import RequestId
from engine.request_states import RequestState
from engine.runner import Proposer
from engine.speculation.heads.watching import Residuals
from tests.engine.driving import Driver, directory, make_runner, open_model, random_prompt
from tests.engine.tiny_models import TINY_MODELS, VOCAB_SIZE, with_wing

FAMILIES = ("llama", "qwen3", "phi3", "gemma3-scaled", "gpt-oss", "qwen2-moe-windows", "deepseek-v3")


class Observer(Proposer):
    def __init__(self, *layers: int) -> None:
        self.layers = layers
        self._residuals = Residuals(layers)
        self.seen: dict[RequestId, dict[int, list[Tensor]]] = defaultdict(lambda: {layer: [] for layer in layers})

    def watch(self, model: Model, forward: CpuForward) -> CpuForward:
        return self._residuals.watch(model, forward)

    def observe(self, rows: Sequence[ScheduledRow], requests: Sequence[RequestState]) -> None:
        counts = [row.num_tokens for row in rows]
        for layer, residual in zip(self.layers, self._residuals.take(), strict=True):
            for row, part in zip(rows, torch.split(residual, counts), strict=True):
                self.seen[row.request_id][layer].append(part)


@pytest.mark.parametrize("batch_invariant", [False, True])
@pytest.mark.parametrize("family", [with_wing(name) for name in FAMILIES])
def test_the_inputs_of_layers_are_shown(family: str, batch_invariant: bool, tmp_path: Path) -> None:
    """In prompt chunks and in decode steps, which use other forms of the model."""
    model = TINY_MODELS[family].build()
    path = TINY_MODELS[family].save(tmp_path, model)
    loaded, config = open_model(
        directory(path), dtype="float32", quant_mode="none", batch_invariant=batch_invariant, num_threads=1
    )
    runner = make_runner(loaded, config)
    observer = Observer(0, 1, loaded.config.num_layers - 1)
    runner.propose_with(observer)
    driver = Driver(runner, config)
    requests = [driver.add(random_prompt(length, VOCAB_SIZE, length)) for length in (7, 19)]
    driver.finish(requests, 6, 5)
    for request in requests:
        token_ids = [*request.prompt_token_ids, *request.output_token_ids][: request.num_computed_tokens]
        with torch.no_grad():
            told = model(torch.tensor([token_ids]), output_hidden_states=True).hidden_states
        for layer, parts in observer.seen[request.request_id].items():
            found = torch.cat(parts)
            assert found.dtype == torch.float32
            torch.testing.assert_close(found, told[layer][0], atol=2e-4, rtol=1e-3)


def test_a_proposer_without_layers_is_shown_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The model's forms stay as they are, too."""
    loaded, config = open_model(directory(TINY_MODELS["llama"].save(tmp_path)), dtype="float32", num_threads=1)
    runner = make_runner(loaded, config)
    forms = dict(runner._forwards._by_rows)  # type: ignore[attr-defined]
    observer = Observer()
    runner.propose_with(observer)
    driver = Driver(runner, config)
    driver.finish([driver.add([5, 6, 7])], 4, 2)
    assert not observer.seen
    assert runner._forwards._by_rows == forms  # type: ignore[attr-defined]
