"""Layouts in which heads are published, and checkpoints that are refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from common.errors import ConfigError
from engine.loader.load import LoadedModel
from engine.speculation.eagle.checkpoint import layers_of, read_head
from engine.speculation.eagle.head import EagleHead
from engine.speculation.proposer import open_speculation
from tests.engine.driving import directory, engine_config, open_model
from tests.engine.speculation.eagle.heads import RandomHead
from tests.engine.tiny_models import TINY_MODELS, VOCAB_SIZE

HEAD = RandomHead()
Tensors = dict[str, Tensor]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return TINY_MODELS["llama"].save(tmp_path_factory.mktemp("llama"))


@pytest.fixture(scope="module")
def loaded(model: Path) -> LoadedModel:
    return open_model(directory(model), dtype="float32", quant_mode="none")[0]


def read(folder: Path, loaded: LoadedModel) -> EagleHead:
    return read_head(folder, loaded.config, loaded.model.embedding, loaded.model.head)


def write(folder: Path, tensors: Tensors, config: dict[str, Any] | None = None) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config or HEAD.config))
    save_file({name: each.contiguous() for name, each in tensors.items()}, folder / "model.safetensors")
    return folder


def of_speculators(tensors: Tensors) -> tuple[Tensors, dict[str, Any]]:
    own = {"draft_vocab_size": 120, "norm_before_residual": False}
    config = {name: value for name, value in HEAD.config.items() if name != "draft_vocab_size"}
    nested = {"architectures": ["Eagle3Speculator"], "speculators_model_type": "eagle3", **own,
              "transformer_layer_config": config}  # fmt: skip
    return {name.replace("midlayer.", "layers.0."): each for name, each in tensors.items()}, nested


LAYOUTS: dict[str, Callable[[Path], object]] = {
    "speculators": lambda folder: write(folder, *of_speculators(HEAD.tensors())),
    "prefixed": lambda folder: write(folder, {f"model.{name}": each for name, each in HEAD.tensors().items()}),
    "bfloat16": lambda folder: write(
        folder, {name: each.bfloat16() if each.is_floating_point() else each for name, each in HEAD.tensors().items()}
    ),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts_are_read_alike(layout: str, tmp_path: Path, loaded: LoadedModel) -> None:
    expected = read(HEAD.save(tmp_path / "plain"), loaded)
    LAYOUTS[layout](tmp_path / "other")
    found = read(tmp_path / "other", loaded)
    assert found.shape == expected.shape
    tolerance = 1e-2 if layout == "bfloat16" else 0.0
    for name in ("fc", "q", "kv", "output", "gate_up", "down", "head"):
        ours, theirs = getattr(found.weights, name).weight, getattr(expected.weights, name).weight
        torch.testing.assert_close(ours, theirs, atol=tolerance, rtol=tolerance)
    assert torch.equal(found.weights.token_ids, expected.weights.token_ids)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("raw", "num_layers", "layers"),
    [
        ({}, 32, (2, 16, 29)),
        ({}, 30, (2, 15, 27)),
        ({"eagle_aux_hidden_state_layer_ids": [29, 2, 16]}, 32, (2, 16, 29)),
        ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 46, 90]}}, 94, (2, 47, 91)),
        ({"eagle_config": {"use_aux_hidden_state": True}}, 32, (2, 16, 29)),
    ],
    ids=str,
)
def test_the_layers_that_a_head_reads(raw: dict[str, Any], num_layers: int, layers: tuple[int, ...]) -> None:
    """Inputs as vLLM numbers them at the top, outputs as SGLang does below."""
    assert layers_of(raw, num_layers) == layers


def changed(change: Callable[[Tensors], object]) -> Callable[[Tensors], Tensors]:
    def made(tensors: Tensors) -> Tensors:
        change(tensors)
        return tensors

    return made


REFUSED: dict[str, tuple[Callable[[Tensors], Tensors], dict[str, Any], str]] = {
    "no fc": (changed(lambda t: t.pop("fc.weight")), {}, "fc.weight is missing: is it an EAGLE-3 head?"),
    "no head": (changed(lambda t: t.pop("lm_head.weight")), {}, "needs lm_head.weight"),
    "EAGLE-1": (changed(lambda t: t.update({"fc.weight": torch.ones(48, 96)})), {}, "must be [48, 144]"),
    "two layers": (changed(lambda t: None), {"num_hidden_layers": 2}, "has one layer, and this one 2"),
    "more weights": (
        changed(lambda t: t.update({"midlayer.self_attn.q_norm.weight": torch.ones(16)})), {}, "another kind of head"
    ),
    "some biases": (
        changed(lambda t: t.update({"midlayer.self_attn.k_proj.bias": torch.ones(32)})), {}, "biases, others none"
    ),
    "other tokens": (changed(lambda t: t["d2t"].add_(VOCAB_SIZE)), {}, "a model of 211 tokens lacks"),
    "another size": (changed(lambda t: None), {"hidden_size": 64}, "embedding of its own"),
    "deeper model": (
        changed(lambda t: None), {"eagle_aux_hidden_state_layer_ids": [2, 16, 29]}, "of 3 layers has no layer 16"
    ),
    "quantized": (
        changed(lambda t: t.update({"fc.weight": torch.ones(48, 144, dtype=torch.int8)})), {}, "is quantized"
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_no_head_of_the_model_is_refused(case: str, tmp_path: Path, loaded: LoadedModel) -> None:
    change, config, told = REFUSED[case]
    folder = write(tmp_path, change(HEAD.tensors()), {**HEAD.config, **config})
    with pytest.raises(ConfigError) as refusal:
        read(folder, loaded)
    assert told in str(refusal.value)


def test_pickles_are_refused(tmp_path: Path, loaded: LoadedModel) -> None:
    HEAD.save(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    torch.save(HEAD.tensors(), tmp_path / "pytorch_model.bin")
    with pytest.raises(ConfigError, match=r"pytorch_model\.bin is a pickle, which could run code"):
        read(tmp_path, loaded)


@pytest.mark.parametrize(
    ("name", "told"), [("/no/such/folder", "not found"), ("default", "name a folder with config")]
)
def test_names_that_are_no_folder_are_refused(name: str, told: str, loaded: LoadedModel) -> None:
    with pytest.raises(ConfigError, match=told):
        open_speculation(engine_config("m", speculative=f"eagle:{name}"), None, loaded)
