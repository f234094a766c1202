"""Modules that a sentence-transformers folder has after the model: `modules.json`, its pooling, dense layers.

    modules.json            [{"path": "", "type": "...Transformer"}, {"path": "1_Pooling", "type": "...Pooling"}, ...]
    1_Pooling/config.json   which hidden states a vector is made of
    2_Dense/                y = activation(W x + b) of the vector
    3_Normalize             scales the vector to length 1; as the last module it is the caller's choice

All of it is read before requests come, and unknown modules are refused: a vector without a layer looks like any
other.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor
from torch.nn import functional

from common.errors import ConfigError, InvalidRequestError, UnsupportedModelError
from common.model_files import ModelFiles
from engine.request import Request

MODULES = "modules.json"
POOLINGS = {"lasttoken": "last", "mean_tokens": "mean", "mean": "mean", "cls_token": "cls", "cls": "cls"}
"""Pooling by the name after `pooling_mode_`, in either spelling."""
ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "Identity": lambda x: x,
    "Tanh": torch.tanh,
    "ReLU": functional.relu,
    "GELU": functional.gelu,
    "SiLU": functional.silu,
    "Sigmoid": torch.sigmoid,
}
Layer = Callable[[Tensor], Tensor]
"""Maps vectors (n, size) to (n, another size), in float32."""
_normalize: Layer = partial(functional.normalize, dim=-1)


@dataclass(frozen=True, slots=True)
class VectorModules:
    """A model's modules. pooling: the default of requests. layers: applied to the pooled vector."""

    pooling: str = "last"
    layers: Sequence[Layer] = ()

    def prepare_request(self, request: Request) -> None:
        """See `engine.wings.Prepare`: `auto` is the model's own pooling."""
        params = request.params
        if params.pooling and (params.max_tokens > 1 or params.logprobs is not None):
            raise InvalidRequestError("pooling needs max_tokens 1, and no logprobs", "pooling")
        if params.pooling == "auto":
            request.params = replace(params, pooling=self.pooling)

    def apply(self, vectors: Tensor) -> Tensor:
        """Apply the layers: (n, hidden) -> (n, size), float32."""
        for layer in self.layers:
            vectors = layer(vectors)
        return vectors


def modules_of(files: ModelFiles, hidden_size: int, device: torch.device) -> VectorModules:
    """Return a model's modules; only the default pooling unless the model is a directory."""
    return read_modules(files.path, hidden_size, device) if files.kind == "directory" else VectorModules()


def read_modules(directory: Path, hidden_size: int, device: torch.device) -> VectorModules:
    """Read a model's modules, if the directory has any. Raises ConfigError, UnsupportedModelError."""
    if not (directory / MODULES).is_file():
        return VectorModules()
    pooling, layers, size = "", list[Layer](), hidden_size
    for module in _listed(directory):
        folder, kind = directory / str(module.get("path", "")), str(module.get("type", "")).rpartition(".")[2]
        if kind == "Transformer":
            if folder != directory:
                raise UnsupportedModelError(f"{MODULES}: the model lies in {folder.name}: only one beside it is read")
        elif kind == "Pooling" and not pooling:
            pooling = _pooling(folder)
        elif kind == "Dense" and pooling:
            layer, size = _dense(folder, size, device)
            layers.append(layer)
        elif kind == "Normalize" and pooling:
            layers.append(_normalize)
        else:
            raise UnsupportedModelError(f"{MODULES}: a module {kind!r} there is not supported")
    if not pooling:
        raise UnsupportedModelError(f"{MODULES} names no pooling")
    while layers and layers[-1] is _normalize:
        layers.pop()
    return VectorModules(pooling, layers)


def _listed(directory: Path) -> list[Mapping[str, Any]]:
    modules = _json(directory / MODULES)
    if not isinstance(modules, list) or not all(isinstance(module, dict) for module in modules):
        raise ConfigError(f"{MODULES} does not hold a list of objects")
    return modules


def _pooling(folder: Path) -> str:
    config = _object(folder)
    mode, start = config.get("pooling_mode"), "pooling_mode_"
    chosen = [name.removeprefix(start) for name in config if name.startswith(start) and config[name]]
    chosen = [str(mode)] if mode else chosen
    if len(chosen) != 1 or chosen[0] not in POOLINGS:
        raise UnsupportedModelError(f"{folder.name}: pooling by {' and '.join(chosen) or 'nothing'} is not supported")
    if config.get("include_prompt", True) is not True:
        raise UnsupportedModelError(f"{folder.name}: pooling without the prompt's tokens is not supported")
    return POOLINGS[chosen[0]]


def _dense(folder: Path, in_size: int, device: torch.device) -> tuple[Layer, int]:
    """Return the layer and the size of its output vectors."""
    config, path = _object(folder), folder / "model.safetensors"
    activation = str(config.get("activation_function", "torch.nn.modules.activation.Tanh")).rpartition(".")[2]
    if activation not in ACTIVATIONS:
        raise UnsupportedModelError(f"{folder.name}: activation {activation!r} (known: {', '.join(ACTIVATIONS)})")
    ends = {config.get(key) or "sentence_embedding" for key in ("module_input_name", "module_output_name")}
    if ends != {"sentence_embedding"}:
        raise UnsupportedModelError(f"{folder.name}: a layer of single tokens' vectors is not supported")
    try:
        found = load_file(path)
    except (OSError, SafetensorError) as error:
        raise ConfigError(f"{folder.name}/{path.name} cannot be read ({type(error).__name__})") from error
    out_size = config.get("out_features")
    shapes = {"linear.weight": [out_size, in_size]}
    if config.get("bias", True):
        shapes["linear.bias"] = [out_size]
    if {name: list(tensor.shape) for name, tensor in found.items()} != shapes:
        raise ConfigError(f"{folder.name}/{path.name} does not hold {shapes}")
    held = {name: tensor.to(device, torch.float32) for name, tensor in found.items()}
    weight, bias, apply = held["linear.weight"], held.get("linear.bias"), ACTIVATIONS[activation]
    return lambda x: apply(functional.linear(x, weight, bias)), weight.shape[0]


def _object(folder: Path) -> dict[str, Any]:
    config = _json(folder / "config.json")
    if not isinstance(config, dict):
        raise ConfigError(f"{folder.name}/config.json does not hold a JSON object")
    return config


def _json(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path.parent.name}/{path.name} cannot be read: {type(error).__name__}") from error
