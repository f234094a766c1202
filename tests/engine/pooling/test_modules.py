"""Embedding models as they are published: in sentence-transformers' layout, without a head; or a reason why not."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from common.errors import ConfigError, UnsupportedModelError
from tests.engine.pooling.test_vectors import assert_close, engine, expected, prompts_of, vectors
from tests.engine.tiny_models import TINY_MODELS, edit_config

HIDDEN = 48  # of the tiny models
MEAN = {"pooling_mode_mean_tokens": True, "pooling_mode_cls_token": False, "pooling_mode_lasttoken": False}
Module = tuple[str, dict[str, Any]]  # its kind, and its config


def write(folder: Path, modules: Sequence[Module], path: str | None = None) -> Path:
    """Write a model and the modules that follow it. path: of the model."""
    listed = [{"idx": 0, "name": "0", "path": path or "", "type": "sentence_transformers.models.Transformer"}]
    for index, (kind, config) in enumerate(modules, 1):
        own = folder / f"{index}_{kind}"
        own.mkdir()
        listed.append({"idx": index, "path": own.name, "type": f"sentence_transformers.models.{kind}"})
        (own / "config.json").write_text(json.dumps(config))
    (folder / "modules.json").write_text(json.dumps(listed))
    return folder


def dense(size_in: int, size_out: int, activation: str = "activation.Tanh", **changes: Any) -> Module:
    config = {"in_features": size_in, "out_features": size_out, "bias": True}
    return "Dense", {**config, "activation_function": f"torch.nn.modules.{activation}", **changes}


def write_layer(folder: Path, layer: nn.Linear, index: int = 2) -> None:
    tensors = {f"linear.{name}": each.detach().clone() for name, each in layer.named_parameters()}
    save_file(tensors, folder / f"{index}_Dense" / "model.safetensors")


def linear(size_in: int, size_out: int, bias: bool = True) -> nn.Linear:
    torch.manual_seed(size_out)
    return nn.Linear(size_in, size_out, bias)


@pytest.fixture
def body(tmp_path: Path) -> Path:
    return save_body("llama", tmp_path)


def found(folder: Path, pooling: str = "auto") -> list[Tensor]:
    return vectors(engine(str(folder), max_num_batched_tokens=16), prompts_of(), pooling)


@pytest.mark.parametrize(
    ("config", "pooling"),
    [
        (MEAN, "mean"),
        ({"pooling_mode_cls_token": True, "pooling_mode_mean_tokens": False}, "cls"),
        ({"pooling_mode_lasttoken": True, "include_prompt": True}, "last"),
        ({"pooling_mode": "mean"}, "mean"),
        ({"pooling_mode": "lasttoken"}, "last"),
    ],
)
def test_the_folder_says_what_is_pooled(config: dict[str, Any], pooling: str, body: Path) -> None:
    write(body, [("Pooling", config), ("Normalize", {})])
    assert_close(found(body), expected("llama", prompts_of(), pooling))
    other = "mean" if pooling == "last" else "last"
    assert_close(found(body, other), expected("llama", prompts_of(), other))


def test_without_modules_it_is_the_last_token(body: Path) -> None:
    assert_close(found(body), expected("llama", prompts_of(), "last"))


@torch.inference_mode()
def test_dense_layers_as_in_embeddinggemma(body: Path) -> None:
    """Two without activation, the second back to the model's size, and no bias."""
    first, second = linear(HIDDEN, 80, bias=False), linear(80, HIDDEN, bias=False)
    identity: dict[str, Any] = {"activation": "linear.Identity", "bias": False}
    write(body, [("Pooling", MEAN), dense(HIDDEN, 80, **identity), dense(80, HIDDEN, **identity), ("Normalize", {})])
    write_layer(body, first)
    write_layer(body, second, 3)
    assert_close(found(body), [second(first(each)) for each in expected("llama", prompts_of(), "mean")])


@torch.inference_mode()
@pytest.mark.parametrize(
    ("name", "activation"), [("Tanh", nn.Tanh()), ("ReLU", nn.ReLU()), ("GELU", nn.GELU()), ("SiLU", nn.SiLU())]
)
def test_activations(name: str, activation: nn.Module, body: Path) -> None:
    layer = linear(HIDDEN, 7)
    write(body, [("Pooling", MEAN), dense(HIDDEN, 7, f"activation.{name}")])
    write_layer(body, layer)
    assert_close(found(body), [activation(layer(each)) for each in expected("llama", prompts_of(), "mean")])


@torch.inference_mode()
def test_a_vector_of_length_1_in_front_of_a_layer(body: Path) -> None:
    layer = linear(HIDDEN, 7)
    write(body, [("Pooling", MEAN), ("Normalize", {}), dense(HIDDEN, 7)])
    write_layer(body, layer, 3)
    states = expected("llama", prompts_of(), "mean")
    assert_close(found(body), [layer(nn.functional.normalize(each, dim=0)).tanh() for each in states])


POOLED: Module = ("Pooling", MEAN)


@pytest.mark.parametrize(
    ("modules", "reason"),
    [
        ([("Pooling", {"pooling_mode_max_tokens": True})], "1_Pooling: pooling by max_tokens is not supported"),
        ([("Pooling", {**MEAN, "pooling_mode_cls_token": True})], "pooling by mean_tokens and cls_token is not"),
        ([("Pooling", {})], "pooling by nothing is not supported"),
        ([("Pooling", {**MEAN, "include_prompt": False})], "pooling without the prompt's tokens is not supported"),
        ([], "modules.json names no pooling"),
        ([POOLED, ("LSTM", {})], "a module 'LSTM' there is not supported"),
        ([POOLED, POOLED], "a module 'Pooling' there is not supported"),
        ([dense(HIDDEN, 4), POOLED], "a module 'Dense' there is not supported"),
        ([POOLED, dense(HIDDEN, 4, "activation.Mish")], "2_Dense: activation 'Mish'"),
        ([POOLED, dense(HIDDEN, 4, module_input_name="token_embeddings")], "a layer of single tokens' vectors"),
    ],
)
def test_what_is_not_known_is_refused(modules: Sequence[Module], reason: str, body: Path) -> None:
    with pytest.raises(UnsupportedModelError, match=reason):
        engine(str(write(body, modules)))


def test_a_model_in_a_folder_of_its_own_is_refused(body: Path) -> None:
    with pytest.raises(UnsupportedModelError, match="the model lies in 0_Transformer"):
        engine(str(write(body, [POOLED], path="0_Transformer")))


def test_layers_that_cannot_be_read(body: Path) -> None:
    write(body, [POOLED, dense(HIDDEN, 7)])
    with pytest.raises(ConfigError, match=r"2_Dense/model.safetensors cannot be read \(FileNotFoundError\)"):
        engine(str(body))
    write_layer(body, linear(HIDDEN, 8))
    with pytest.raises(ConfigError, match=r"2_Dense/model.safetensors does not hold .*\[7, 48\]"):
        engine(str(body))
    for text in ("[", "{}", "[1]"):
        (body / "modules.json").write_text(text)
        with pytest.raises(ConfigError, match=r"modules.json"):
            engine(str(body))


# -- a model without a head, whose names lack the prefix `model.` ----------------------------------------------------


def save_body(name: str, folder: Path, shard_bytes: int = 0) -> Path:
    TINY_MODELS[name].build().model.save_pretrained(folder, max_shard_size=shard_bytes or "1GB")
    return folder


@pytest.mark.parametrize(
    ("name", "shard_bytes"),
    [
        ("llama", 0),
        ("qwen2", 30_000),
        ("qwen3", 0),
        pytest.param("phi3", 0, marks=pytest.mark.wing("engine.fused")),
    ],
)
def test_vectors_equal_transformers(name: str, shard_bytes: int, tmp_path: Path) -> None:
    """Phi-3 stores several weights in one."""
    made = engine(str(save_body(name, tmp_path, shard_bytes)))
    for pooling in ("last", "mean"):
        assert_close(vectors(made, prompts_of(), pooling), expected(name, prompts_of(), pooling))


def test_a_class_with_a_head_may_be_named(tmp_path: Path) -> None:
    """As Qwen3-Embedding's files do."""
    path = save_body("qwen3", tmp_path)
    edit_config(path, architectures=["Qwen3ForCausalLM"])
    assert_close(vectors(engine(str(path)), prompts_of(), "last"), expected("qwen3", prompts_of(), "last"))


def test_a_missing_weight_is_named_as_elsewhere(tmp_path: Path) -> None:
    path = save_body("llama", tmp_path)
    edit_config(path, num_hidden_layers=4)
    with pytest.raises(ConfigError, match=r"missing: model\.layers\.3\."):
        engine(str(path))
