"""Directories with safetensors: an error in one is reported in one line."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from common.errors import ConfigError, UnsupportedModelError
from tests.engine.driving import directory, open_model
from tests.engine.tiny_models import TINY_MODELS, edit_config, edit_weights


@pytest.fixture
def model_dir(tmp_path: Path) -> Path:
    return TINY_MODELS["llama"].save(tmp_path / "model")


UP, NORM = "model.layers.1.mlp.up_proj.weight", "model.norm.weight"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda tensors: tensors.pop(UP), rf"missing: {UP}"),
        (lambda tensors: tensors.update({"model.extra.weight": torch.zeros(1)}), r"unexpected: model\.extra\.weight"),
        (lambda tensors: tensors.update({NORM: torch.zeros(5)}), rf"wrong shape: {NORM} is \[5\], not \[48\]"),
        (lambda tensors: tensors.update({NORM: torch.ones(48).to(torch.int8)}), rf"{NORM} holds I8 numbers"),
    ],
    ids=["missing", "unexpected", "of another shape", "integers"],
)
def test_weights_that_do_not_fit_are_named(
    change: Callable[[dict[str, Tensor]], object], message: str, model_dir: Path
) -> None:
    edit_weights(model_dir, change)
    with pytest.raises(ConfigError, match=message):
        open_model(directory(model_dir))


def test_many_problems_are_counted(model_dir: Path) -> None:
    edit_config(model_dir, num_hidden_layers=5)
    with pytest.raises(ConfigError, match=r"missing: .* and 13 more"):
        open_model(directory(model_dir))


def test_stored_tables_are_ignored(model_dir: Path) -> None:
    table = {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.zeros(4)}
    edit_weights(model_dir, lambda tensors: tensors.update(table))
    open_model(directory(model_dir))


def test_weights_are_cast(model_dir: Path) -> None:
    loaded, _ = open_model(directory(model_dir), dtype="bfloat16", quant_mode="none")
    stored = load_file(model_dir / "model.safetensors")["model.embed_tokens.weight"]
    assert torch.equal(loaded.model.embedding, stored.bfloat16())


@pytest.mark.parametrize("content", [b"", b"\xff" * 100, (50).to_bytes(8, "little") + b"{" * 50])
def test_damaged_files_are_named(model_dir: Path, content: bytes) -> None:
    (model_dir / "model.safetensors").write_bytes(content)
    with pytest.raises(ConfigError, match=r"model\.safetensors"):
        open_model(directory(model_dir))


def edit_header(path: Path, change: Callable[[dict[str, Any]], object]) -> None:
    content = path.read_bytes()
    length = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + length])
    change(header)
    changed = json.dumps(header).encode()
    path.write_bytes(len(changed).to_bytes(8, "little") + changed + content[8 + length :])


@pytest.mark.parametrize("change", [{"shape": [-1, 48]}, {"shape": "48"}, {"data_offsets": [0]}, {"dtype": 3}])
def test_damaged_headers_are_named(model_dir: Path, change: dict[str, Any]) -> None:
    edit_header(model_dir / "model.safetensors", lambda header: header[NORM].update(change))
    with pytest.raises(ConfigError, match=r"header is damaged at 'model\.norm\.weight'"):
        open_model(directory(model_dir))


def test_tensors_that_overlap_are_refused(model_dir: Path) -> None:
    edit_header(
        model_dir / "model.safetensors",
        lambda header: header[NORM].update(data_offsets=header["lm_head.weight"]["data_offsets"]),
    )
    with pytest.raises(ConfigError, match=r"model\.safetensors is damaged"):
        open_model(directory(model_dir))


@pytest.mark.parametrize("kept", [0.2, 0.9, 0.999])
def test_files_that_are_cut_off_are_named(model_dir: Path, kept: float) -> None:
    path = model_dir / "model.safetensors"
    content = path.read_bytes()
    path.write_bytes(content[: int(len(content) * kept)])
    with pytest.raises(ConfigError, match=r"model\.safetensors is cut off"):
        open_model(directory(model_dir))


def test_an_index_names_only_files_beside_it(model_dir: Path) -> None:
    index = model_dir / "model.safetensors.index.json"
    for files in ("../model.safetensors", "/etc/passwd", ""):
        index.write_text(json.dumps({"weight_map": {"model.norm.weight": files}}))
        with pytest.raises(ConfigError, match=r"outside|missing"):
            open_model(directory(model_dir))
    index.write_text("[]")
    with pytest.raises(ConfigError, match="no weight_map"):
        open_model(directory(model_dir))


def test_one_file_has_all_weights_whatever_lies_beside_it(model_dir: Path) -> None:
    for name in ("consolidated.safetensors", "adapter_model.safetensors"):
        save_file({"layers.0.attention.wq.weight": torch.ones(2, 2)}, model_dir / name)
    open_model(directory(model_dir))
    (model_dir / "model.safetensors").unlink()
    with pytest.raises(ConfigError, match="missing: model"):
        open_model(directory(model_dir))


def test_missing_files_are_named(tmp_path: Path) -> None:
    path = TINY_MODELS["llama-tied-sharded"].save(tmp_path / "model")
    shards = sorted(path.glob("*.safetensors"))
    assert len(shards) > 2
    shards[1].unlink()
    with pytest.raises(ConfigError, match=shards[1].name):
        open_model(directory(path))
    (path / "model.safetensors.index.json").unlink()
    for shard in path.glob("*.safetensors"):
        shard.unlink()
    with pytest.raises(ConfigError, match=r"no \.safetensors files"):
        open_model(directory(path))


def test_unsupported_models_say_what_is_known(model_dir: Path) -> None:
    edit_config(model_dir, architectures=["GPT2LMHeadModel"])
    with pytest.raises(UnsupportedModelError, match=r"GPT2LMHeadModel.*LlamaForCausalLM, Mi(Mo|stral)"):
        open_model(directory(model_dir))


@pytest.mark.wing("engine.dummy_weights")
def test_dummy_weights_need_only_the_config(model_dir: Path) -> None:
    (model_dir / "model.safetensors").unlink()
    first, _ = open_model(directory(model_dir), load_format="dummy")
    second, _ = open_model(directory(model_dir), load_format="dummy")
    assert first.fingerprint == second.fingerprint
    assert torch.equal(first.model.embedding, second.model.embedding)
    assert 0.015 < float(first.model.embedding.float().std()) < 0.025
