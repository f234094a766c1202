"""Adapters that do not fit a model are refused by name before any weight is read."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from common.errors import ConfigError
from common.lora.adapter_ref import AdapterRef
from engine.loader.random_weights import DRY_RUN_CONFIG
from engine.lora.layers import layers_of
from engine.lora.reader import AdapterFile
from tests.harness.adapters import PREFIX, write_adapter

pytestmark = pytest.mark.wing("engine.lora")
LAYERS = layers_of(DRY_RUN_CONFIG)
HIDDEN, HEADS = DRY_RUN_CONFIG.hidden_size, DRY_RUN_CONFIG.q_size
SHAPES = {
    f"model.layers.{layer}.self_attn.{name}.weight": shape
    for layer in range(DRY_RUN_CONFIG.num_layers)
    for name, shape in (("q_proj", (HEADS, HIDDEN)), ("v_proj", (DRY_RUN_CONFIG.kv_size, HIDDEN)))
}
Q = f"{PREFIX}model.layers.0.self_attn.q_proj"


def changed(tensors: dict[str, torch.Tensor], what: str) -> dict[str, torch.Tensor]:
    a = tensors[f"{Q}.lora_A.weight"]
    match what:
        case "partner":
            del tensors[f"{Q}.lora_B.weight"]
        case "shape":
            tensors[f"{Q}.lora_A.weight"] = a[:, :-1].contiguous()
        case "rank":
            tensors[f"{Q}.lora_A.weight"] = a[:-1].contiguous()
        case "module":
            tensors[f"{PREFIX}model.layers.99.mlp.experts.0.lora_A.weight"] = a.clone()
        case "dora":
            tensors[f"{Q}.lora_magnitude_vector"] = a[0].clone()
        case "type":
            tensors[f"{Q}.lora_A.weight"] = a.to(torch.int8)
        case "nothing":
            tensors.clear()
    return tensors


@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("partner", "q_proj.lora_A.weight without its partner"),
        ("shape", "this model and its rank need ["),
        ("rank", "q_proj.lora_A.weight is"),
        ("module", "changes model.layers.99.mlp.experts.0, which adapters of this model cannot"),
        ("dora", "lora_magnitude_vector, which is no weight of plain LoRA"),
        ("type", "holds I8 numbers"),
        ("nothing", "holds no weights"),
    ],
)
def test_weights_that_do_not_fit_are_refused(what: str, message: str, tmp_path: Path) -> None:
    folder = write_adapter(tmp_path / "a", SHAPES, ("q_proj", "v_proj"))
    path = folder / "adapter_model.safetensors"
    save_file(changed(load_file(path), what), path)
    with pytest.raises(ConfigError) as refused:
        AdapterFile(AdapterRef.of(folder), LAYERS, 64)
    assert message in str(refused.value)
