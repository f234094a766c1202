"""Reads published EAGLE-3 heads: `config.json`, and weights as safetensors.

Two layouts of `config.json` are supported: a Llama's with the head's fields added, which EAGLE's authors, SpecForge
and NVIDIA write, and that of vLLM's speculators, with the Llama's fields in `transformer_layer_config`.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from common.errors import ConfigError
from engine.cpu_gemms.gemms import dense_linear
from engine.layers.linear import Linear
from engine.loader.safetensors import PLAIN_TYPES, SafetensorsWeights
from engine.models.config import ModelConfig
from engine.models.hf_config import config_from_hf, read_hf_config
from engine.speculation.eagle.head import EagleHead, HeadShape, HeadWeights

BIN_NAME = "pytorch_model.bin"
LAYER = "midlayer."
# Another name of the layer, and a tensor that is not read: t2d is the inverse of d2t.
OTHER_LAYER, UNUSED = "layers.0.", ("t2d",)


def read_head(folder: Path, model: ModelConfig, embedding: Tensor, output: Linear) -> EagleHead:
    """Read the head in the dtype of `embedding`. Raises ConfigError if it does not fit or is not supported.

    embedding, output: the model's, for heads without their own.
    """
    raw = read_hf_config(folder)
    raw = {"architectures": ["Eagle3"], **(raw.get("transformer_layer_config") or {}), **raw}
    config = config_from_hf(raw)
    if config.num_layers != 1:
        raise ConfigError(f"{folder.name}: an EAGLE-3 head has one layer, and this one {config.num_layers}")
    layers = layers_of(raw, model.num_layers)
    shape = HeadShape(
        layers, config.hidden_size, config.num_heads, config.num_kv_heads, config.head_dim, config.rms_norm_eps,
        config.rope, bool(raw.get("norm_before_residual")),
    )  # fmt: skip
    weights = _Weights(folder.name, _read_tensors(folder, embedding.device), embedding.dtype)
    held = _head_weights(weights, config, model, len(layers), embedding, output)
    weights.check_all_taken()
    return EagleHead(shape, held)


def layers_of(raw: Mapping[str, Any], num_layers: int) -> tuple[int, ...]:
    """Return the layers whose inputs the head reads, in rising order. Raises ConfigError for layers out of range.

    The top of the config lists them as vLLM does; `eagle_config` lists layers whose outputs are read, as in SGLang
    and SpecForge.
    """
    name = "eagle_aux_hidden_state_layer_ids"
    if raw.get(name):
        layers = [int(layer) for layer in raw[name]]
    elif (raw.get("eagle_config") or {}).get(name):
        layers = [int(layer) + 1 for layer in raw["eagle_config"][name]]
    else:
        layers = [max(layer, 0) for layer in (2, num_layers // 2, num_layers - 3)]
    wrong = [layer for layer in layers if not 0 <= layer < num_layers]
    if wrong:
        raise ConfigError(f"{name}: a model of {num_layers} layers has no layer {wrong[0]}")
    return tuple(sorted(layers))


class _Weights:
    """Tensors by name, each of which is taken once."""

    def __init__(self, name: str, tensors: dict[str, Tensor], dtype: torch.dtype) -> None:
        self._name, self._tensors, self._dtype = name, tensors, dtype

    def has(self, name: str) -> bool:
        return name in self._tensors

    def num_rows(self, name: str) -> int:
        return len(self._tensors[name])

    def take(self, name: str, *shape: int) -> Tensor:
        tensor = self._tensors.pop(name, None)
        if tensor is None:
            raise ConfigError(f"{self._name}: {name} is missing: is it an EAGLE-3 head?")
        if tensor.shape != shape:
            raise ConfigError(f"{self._name}: {name} is {list(tensor.shape)}, and must be {list(shape)}")
        return tensor.to(self._dtype).contiguous() if tensor.is_floating_point() else tensor.long()

    def linear(self, names: tuple[str, ...], sizes: tuple[int, ...], in_size: int) -> Linear:
        """Join the weights of these names, with these output sizes, and their biases if there are any."""
        rows = [self.take(f"{name}.weight", size, in_size) for name, size in zip(names, sizes, strict=True)]
        biases = [
            self.take(f"{name}.bias", size)
            for name, size in zip(names, sizes, strict=True)
            if self.has(f"{name}.bias")
        ]
        if biases and len(biases) < len(rows):
            raise ConfigError(f"{self._name}: some of {', '.join(names)} have biases, others none")
        return dense_linear(torch.cat(rows), torch.cat(biases) if biases else None)

    def check_all_taken(self) -> None:
        unknown = sorted(self._tensors.keys() - set(UNUSED))
        if unknown:
            raise ConfigError(f"{self._name}: weights of another kind of head: {', '.join(unknown[:5])}")


def _head_weights(
    weights: _Weights, config: ModelConfig, model: ModelConfig, num_read: int, embedding: Tensor, output: Linear
) -> HeadWeights:
    hidden = config.hidden_size
    attention, mlp = f"{LAYER}self_attn", f"{LAYER}mlp"
    if not weights.has("embed_tokens.weight") and hidden != model.hidden_size:
        raise ConfigError(f"a head of {hidden} numbers a token needs an embedding of its own: embed_tokens.weight")
    token_ids = None
    if weights.has("d2t"):
        offsets = weights.take("d2t", weights.num_rows("d2t"))
        token_ids = offsets + torch.arange(offsets.shape[0], device=offsets.device)
        if int(token_ids.min()) < 0 or int(token_ids.max()) >= model.vocab_size:
            raise ConfigError(f"d2t names tokens that a model of {model.vocab_size} tokens lacks")
    draft_vocab = model.vocab_size if token_ids is None else len(token_ids)
    if weights.has("lm_head.weight"):
        head = weights.linear(("lm_head",), (draft_vocab,), hidden)
    elif token_ids is None and hidden == model.hidden_size:
        head = output
    else:
        raise ConfigError("a head with tokens of its own, or of another size than the model, needs lm_head.weight")
    if weights.has("embed_tokens.weight"):
        embedding = weights.take("embed_tokens.weight", model.vocab_size, hidden)
    return HeadWeights(
        fc=weights.linear(("fc",), (hidden,), num_read * model.hidden_size),
        embedding=embedding,
        input_norm=weights.take(f"{LAYER}input_layernorm.weight", hidden),
        hidden_norm=weights.take(f"{LAYER}hidden_norm.weight", hidden),
        q=weights.linear((f"{attention}.q_proj",), (config.q_size,), 2 * hidden),
        kv=weights.linear((f"{attention}.k_proj", f"{attention}.v_proj"), (config.kv_size,) * 2, 2 * hidden),
        output=weights.linear((f"{attention}.o_proj",), (hidden,), config.q_size),
        mlp_norm=weights.take(f"{LAYER}post_attention_layernorm.weight", hidden),
        gate_up=weights.linear((f"{mlp}.gate_proj", f"{mlp}.up_proj"), (config.intermediate_size,) * 2, hidden),
        down=weights.linear((f"{mlp}.down_proj",), (hidden,), config.intermediate_size),
        norm=weights.take("norm.weight", hidden),
        head=head,
        token_ids=token_ids,
    )


def _read_tensors(folder: Path, device: torch.device) -> dict[str, Tensor]:
    """Read all tensors, under the names of EAGLE's authors. Raises ConfigError."""
    if (folder / BIN_NAME).is_file() and not any(folder.glob("*.safetensors")):
        raise ConfigError(
            f"{folder.name}: {BIN_NAME} is a pickle, which could run code: save its tensors as model.safetensors "
            "(safetensors.torch.save_file)"
        )
    files = SafetensorsWeights(folder, torch.float32, device)
    quantized = [
        name for name, stored in files.tensors.items() if stored.type_name not in (*PLAIN_TYPES, "I64", "I32", "BOOL")
    ]
    if quantized:
        raise ConfigError(f"{folder.name}: {quantized[0]} is quantized, which a head's weights must not be")
    found = {name: files.read(name) for name in files.tensors}
    return {_own_name(name): tensor for name, tensor in found.items()}


def _own_name(name: str) -> str:
    name = name.removeprefix("model.")
    return LAYER + name.removeprefix(OTHER_LAYER) if name.startswith(OTHER_LAYER) else name
