"""Progress of loading: of every kind of checkpoint, in order, and complete at the end."""

import pytest
import torch

from common.model_files import resolve_model
from engine.config import EngineConfig
from engine.layers.weights import PartSource
from engine.loader.load import load_model
from engine.loader.model_weights import ModelWeights
from kvstore.layout import WHOLE, Shard


class Weights(PartSource):
    """Of a model, without the bytes."""

    def take_part(self, name, part):
        return torch.empty(tuple(map(len, part)))


def test_parts_are_of_the_numbers_and_what_comes_later_counts_when_it_is_read(monkeypatch):
    monkeypatch.setattr("engine.loader.model_weights.INTERVAL_SECONDS", 0.0)
    told = []
    shapes = {"a": (2, 3), "b": (3,), "c": (1,)}
    weights = ModelWeights(Weights(), shapes, {}, kept={"b"}, on_progress=lambda *args: told.append(args))
    for name, shape in (("a", (2, 3)), ("b", (3,)), ("c", (1,))):
        weights.take(name, shape)
    weights.count("b")
    assert told == [("loading weights", 0.6), ("loading weights", 0.7), ("loading weights", 1.0)]


def test_it_is_told_ten_times_a_second_at_most_and_at_the_end():
    told = []
    shapes = {str(n): (1,) for n in range(1000)}
    weights = ModelWeights(Weights(), shapes, {}, on_progress=lambda _, part: told.append(part))
    for number in range(1000):
        weights.take(str(number), (1,))
    assert told[0] == 0.001
    assert told[-1] == 1.0
    assert len(told) < 20


@pytest.mark.parametrize(
    "shard", [WHOLE, pytest.param(Shard(1, 2), marks=pytest.mark.wing("engine.tensor_parallel"))]
)
def test_a_model_is_loaded_with_progress(shard):
    told = []
    config = EngineConfig("dry-run", device="cpu", quant_mode="none")
    load_model(resolve_model("dry-run"), config, shard=shard, on_progress=lambda *args: told.append(args))
    assert told[-1] == ("loading weights", 1.0)
