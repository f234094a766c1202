"""Tiny models with a module for multi-token prediction, as DeepSeek publishes them, and a reference of its drafts."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn import functional

from tests.engine.tiny_models import TINY_MODELS, TinyModel

NUM_LAYERS = 3  # of a model here; its module is the next one


# MiMo's names of these; its module concatenates hidden states first.
MIMO = {
    "enorm": "token_layernorm", "hnorm": "hidden_layernorm", "eh_proj": "input_proj",
    "shared_head.norm": "final_layernorm",
}  # fmt: skip


@dataclass(frozen=True)
class ModelWithModule:
    """changes: to config.json. copies: whether the module has its own embedding and head, as DeepSeek's;
    own: whether these differ from the model's. is_mimo: MiMo's family instead of DeepSeek-V3's.
    """

    changes: dict[str, Any] = field(default_factory=dict)
    copies: bool = True
    own: bool = False
    is_mimo: bool = False

    @property
    def tiny(self) -> TinyModel:
        """Build the model with the module's decoder layer as its last one."""
        family, of_family = ("Qwen2", {}) if self.is_mimo else ("DeepseekV3", TINY_MODELS["deepseek-v3"].changes)
        return TinyModel(family, {**of_family, **self.changes, "num_hidden_layers": NUM_LAYERS + 1})

    def tensors(self, model: transformers.PreTrainedModel) -> dict[str, Tensor]:
        """Return the module's tensors in addition to that layer."""
        torch.manual_seed(5)
        size = model.config.hidden_size
        found = {name: 1 + 0.15 * torch.randn(size) for name in ("enorm", "hnorm", "shared_head.norm")}
        found["eh_proj"] = 0.15 * torch.randn(size, 2 * size)
        if self.copies and not self.is_mimo:
            weights = model.state_dict()
            found["embed_tokens"] = weights["model.embed_tokens.weight"].clone()
            found["shared_head.head"] = weights["lm_head.weight"].clone()
            if self.own:
                found["embed_tokens"] += 0.15 * torch.randn_like(found["embed_tokens"])
                found["shared_head.head"] += 0.15 * torch.randn_like(found["shared_head.head"])
        return found

    def save(self, path: Path, model: transformers.PreTrainedModel | None = None) -> Path:
        """Save the model and its module. model: built by `tiny`."""
        model = model or self.tiny.build()
        model.save_pretrained(path)
        return self.divide(path, self.tensors(model))

    def divide(self, path: Path, tensors: Mapping[str, Tensor]) -> Path:
        """Make the last layer of a saved model its module, with these additional tensors."""
        config = json.loads((path / "config.json").read_text())
        num_layers = config["num_hidden_layers"] - 1
        config |= {"num_hidden_layers": num_layers, "num_nextn_predict_layers": 1}
        file, layer = path / "model.safetensors", f"model.layers.{num_layers}"
        own = {f"{layer}.{name}.weight": each for name, each in tensors.items()}
        found = {**load_file(file), **own}
        if self.is_mimo:
            config |= {"architectures": ["MiMoForCausalLM"], "model_type": "mimo"}
            found[f"{layer}.eh_proj.weight"] = found[f"{layer}.eh_proj.weight"].roll(config["hidden_size"], 1)
            for ours, theirs in MIMO.items():
                found[f"{layer}.{theirs}.weight"] = found.pop(f"{layer}.{ours}.weight")
            found = {name.replace(f"{layer}.", "model.mtp_layers.0."): each for name, each in found.items()}
        (path / "config.json").write_text(json.dumps(config))
        save_file(found, file)
        return path


class Reference:
    """Computes the module over whole sequences with transformers' decoder layer."""

    def __init__(self, model: transformers.PreTrainedModel, tensors: Mapping[str, Tensor]) -> None:
        self.model, self.tensors, self.eps = model, tensors, model.config.rms_norm_eps
        self.embedding = tensors.get("embed_tokens", model.state_dict()["model.embed_tokens.weight"])
        self.head = tensors.get("shared_head.head", model.state_dict()["lm_head.weight"])

    def norm(self, x: Tensor, name: str) -> Tensor:
        return functional.rms_norm(x, x.shape[-1:], self.tensors[name], self.eps)

    @torch.no_grad()
    def outputs(self, token_ids: Sequence[int], hidden: Tensor) -> Tensor:
        """Compute o of all positions. token_ids: the token after each position. hidden: (n, hidden)."""
        embedded = self.embedding[list(token_ids)]
        x = torch.cat([self.norm(embedded, "enorm"), self.norm(hidden, "hnorm")], -1) @ self.tensors["eh_proj"].T
        positions = torch.arange(len(x))[None]
        mask = torch.full((len(x), len(x)), float("-inf")).triu(1)[None, None]
        rotary = self.model.model.rotary_emb(x[None], positions)
        layer = self.model.model.layers[NUM_LAYERS]
        out = layer(x[None], attention_mask=mask, position_ids=positions, position_embeddings=rotary)
        return self.norm((out if isinstance(out, Tensor) else out[0])[0], "shared_head.norm")

    @torch.no_grad()
    def drafts(self, token_ids: Sequence[int], count: int) -> list[int]:
        """Return the likeliest tokens after `token_ids`."""
        known = list(token_ids)
        states = self.model(torch.tensor([known[:-1]]), output_hidden_states=True).hidden_states[NUM_LAYERS][0]
        hidden = self.model.model.norm(states)
        for _ in range(count):
            outputs = self.outputs(known[1:], hidden)
            known.append(int((outputs[-1] @ self.head.T).argmax()))
            hidden = torch.cat([hidden, outputs[-1:]])
        return known[len(token_ids) :]
