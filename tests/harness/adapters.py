"""LoRA adapters with random weights, in PEFT's format, and how to merge one into a model."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from common.lora.adapter_config import read_adapter_config
from engine.lora.layers import layers_of
from engine.models.config import ModelConfig

PREFIX = "base_model.model."
ALL_LINEAR = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def shapes_of_config(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Return the shapes of all weights that adapters of the model may change, except the embedding."""
    return {
        f"{module.name}.weight": (module.num_outputs, layer.num_columns)
        for layer in layers_of(config).linears
        for module in layer.modules
    }


def write_adapter(
    folder: Path,
    shapes: Mapping[str, tuple[int, ...]],
    targets: Sequence[str] = ALL_LINEAR,
    seed: int = 0,
    std: float = 0.15,
    **config: Any,
) -> Path:
    """Write an adapter of the modules whose names end with one of `targets`.

    shapes: (out, in) of the model's weights, by name. config: further fields of adapter_config.json.
    """
    folder.mkdir(parents=True, exist_ok=True)
    raw = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "bias": "none", "target_modules": [*targets], **config}
    (folder / "adapter_config.json").write_text(json.dumps(raw))
    ranks: dict[str, int] = raw.get("rank_pattern", {})
    generator = torch.Generator().manual_seed(seed)
    tensors: dict[str, Tensor] = {}
    for name, shape in shapes.items():
        module = name.removesuffix(".weight")
        if module == name or not module.endswith(tuple(targets)):
            continue
        rank = next((rank for end, rank in ranks.items() if module.endswith(f".{end}")), raw["r"])
        rows, columns = shape
        if module.endswith("embed_tokens"):
            a, b, sizes = "lora_embedding_A", "lora_embedding_B", ((rank, rows), (columns, rank))
        else:
            a, b, sizes = "lora_A.weight", "lora_B.weight", ((rank, columns), (rows, rank))
        for part, size in zip((a, b), sizes, strict=True):
            tensors[f"{PREFIX}{module}.{part}"] = torch.randn(size, generator=generator) * std
    save_file(tensors, folder / "adapter_model.safetensors")
    return folder


def deltas(folder: Path) -> dict[str, Tensor]:
    """Return what the adapter adds to each weight, by the weight's name."""
    config, tensors = read_adapter_config(folder), load_file(folder / "adapter_model.safetensors")
    result = {}
    for name, a in tensors.items():
        if name.endswith(".lora_A.weight"):
            module = name.removeprefix(PREFIX).removesuffix(".lora_A.weight")
            delta = tensors[name.replace("lora_A", "lora_B")] @ a
        elif name.endswith(".lora_embedding_A"):
            module = name.removeprefix(PREFIX).removesuffix(".lora_embedding_A")
            delta = (tensors[name.replace("embedding_A", "embedding_B")] @ a).T
        else:
            continue
        result[f"{module}.weight"] = delta * config.scale_of(module)
    return result


@torch.no_grad()
def merge(model: torch.nn.Module, folder: Path) -> None:
    """Add the adapter to the weights of a transformers model, in place."""
    parameters = dict(model.named_parameters(remove_duplicate=False))
    for name, delta in deltas(folder).items():
        parameters[name].add_(delta)
