"""Fingerprints, the dry-run model, and progress of loading."""

from __future__ import annotations

import shutil
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from common.errors import ConfigError
from common.model_files import ModelFiles, resolve_model
from common.wings import has_wing
from engine.config import EngineConfig
from engine.layers.weights import PartSource
from engine.loader.checkpoint import ModelWeights
from engine.loader.load import fingerprint, load_model
from engine.loader.partial_weights import PartialWeights
from kvstore.layout import WHOLE, Shard
from tests.engine.driving import Driver, directory, make_runner, open_model
from tests.engine.tiny_models import TINY_MODELS

DRY_RUN = ModelFiles("dry-run", "dry-run", Path())


def test_equal_files_have_equal_fingerprints_and_others_not(tmp_path: Path) -> None:
    first = TINY_MODELS["llama"].save(tmp_path / "first")
    shutil.copytree(first, tmp_path / "second")
    loaded, _ = open_model(directory(first))
    assert open_model(directory(tmp_path / "second"))[0].fingerprint == loaded.fingerprint
    others = {
        loaded.fingerprint,
        open_model(directory(first), dtype="float32")[0].fingerprint,
    }
    if has_wing("engine.dummy_weights"):
        others.add(open_model(directory(first), load_format="dummy")[0].fingerprint)
    weights = tmp_path / "second" / "model.safetensors"
    content = bytearray(weights.read_bytes())
    content[-5] ^= 1
    weights.write_bytes(content)
    others.add(open_model(directory(tmp_path / "second"))[0].fingerprint)
    assert len(others) == 3 + has_wing("engine.dummy_weights")


@pytest.mark.wing("common.gguf")
def test_the_fingerprint_of_a_real_file_is_cheap() -> None:
    path = resolve_model("").path
    began = time.process_time()
    fingerprint({}, [path])
    assert time.process_time() - began < 0.3


def test_dry_run_output_is_lively_and_repeatable() -> None:
    loaded, config = open_model(DRY_RUN)
    assert (loaded.dtype, loaded.quant_mode) == (torch.float32, "none")
    prompts = [list(b"Hello"), list(b"What is the capital of France?"), [256, *b"abc"]]
    outputs = []
    for _ in range(2):
        driver = Driver(make_runner(loaded, config), config)
        requests = [driver.add(prompt) for prompt in prompts]
        driver.finish(requests, 60, chunk=16)
        outputs.append([request.output_token_ids for request in requests])
    assert outputs[0] == outputs[1]
    for tokens in outputs[0]:
        assert len(set(tokens)) > 20


def test_dry_run_weights_are_the_same_in_every_type() -> None:
    """Workers on different devices may exchange KV when their fingerprints are equal, so their weights must be."""
    exact: Any = open_model(DRY_RUN)[0].model
    rounded: Any = open_model(DRY_RUN, dtype="bfloat16", quant_mode="none")[0].model
    last, rounded_last = exact.blocks[-1], rounded.blocks[-1]
    assert torch.equal(last.down.weight.bfloat16(), rounded_last.down.weight)


def test_a_missing_gpu_is_said() -> None:
    if torch.cuda.is_available():
        pytest.skip("has a GPU")
    with pytest.raises(ConfigError, match="no CUDA device"):
        open_model(DRY_RUN, device="cuda")


# -- progress --------------------------------------------------------------------------------------------------------


class Weights(PartSource):
    """Stands for a model's weights, without the bytes."""

    def take_part(self, name, part):
        return torch.empty(tuple(map(len, part)))


def test_parts_are_of_the_numbers_and_what_comes_later_counts_when_it_is_read(monkeypatch):
    monkeypatch.setattr("engine.loader.checkpoint.INTERVAL_SECONDS", 0.0)
    told = []
    shapes = {"a": (2, 3), "b": (3,), "c": (1,)}
    weights = PartialWeights(Weights(), shapes, kept={"b"}, on_progress=lambda *args: told.append(args))
    for name, shape in (("a", (2, 3)), ("b", (3,)), ("c", (1,))):
        weights.take(name, shape)
    weights.count("b")
    assert told == [("loading weights", 0.6), ("loading weights", 0.7), ("loading weights", 1.0)]


def test_it_is_told_ten_times_a_second_at_most_and_at_the_end():
    told = []
    shapes = {str(n): (1,) for n in range(1000)}
    weights = ModelWeights(Weights(), shapes, on_progress=lambda _, part: told.append(part))
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
