"""Embedding models as they are published: a model without a head, whose names begin behind `model.`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from common.errors import ConfigError
from tests.engine.pooling.test_vectors import assert_close, engine, expected, prompts_of, vectors
from tests.engine.tiny_models import TINY_MODELS


def save_body(name: str, folder: Path, shard_bytes: int = 0) -> Path:
    TINY_MODELS[name].build().model.save_pretrained(folder, max_shard_size=shard_bytes or "1GB")
    return folder


def change(folder: Path, **fields: object) -> None:
    config = folder / "config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), **fields}))


@pytest.mark.parametrize(("name", "shard_bytes"), [("llama", 0), ("qwen2", 30_000), ("qwen3", 0), ("phi3", 0)])
def test_vectors_equal_transformers(name: str, shard_bytes: int, tmp_path: Path) -> None:
    """Phi-3 stores several weights in one."""
    made = engine(str(save_body(name, tmp_path, shard_bytes)))
    for pooling in ("last", "mean"):
        assert_close(vectors(made, prompts_of(), pooling), expected(name, prompts_of(), pooling))


@pytest.mark.wing("engine.quantization")
def test_quantized_weights_give_near_vectors(tmp_path: Path) -> None:
    made = engine(str(save_body("llama", tmp_path)), dtype="bfloat16", quant_mode="int8-weight")
    found = vectors(made, prompts_of(), "last")
    for ours, theirs in zip(found, expected("llama", prompts_of(), "last"), strict=True):
        assert torch.cosine_similarity(ours, theirs, dim=0) > 0.995


def test_a_class_with_a_head_may_be_named(tmp_path: Path) -> None:
    """As Qwen3-Embedding's files do."""
    path = save_body("qwen3", tmp_path)
    change(path, architectures=["Qwen3ForCausalLM"])
    assert_close(vectors(engine(str(path)), prompts_of(), "last"), expected("qwen3", prompts_of(), "last"))


def test_a_missing_weight_is_named_as_elsewhere(tmp_path: Path) -> None:
    path = save_body("llama", tmp_path)
    change(path, num_hidden_layers=4)
    with pytest.raises(ConfigError, match=r"missing: model\.layers\.3\."):
        engine(str(path))
