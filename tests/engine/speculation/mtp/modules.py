"""Tiny models with a module for multi-token prediction, as DeepSeek publishes them, and what the module says."""

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

NUM_LAYERS = 3  # of the model; its module is the next one
LAYER = f"model.layers.{NUM_LAYERS}"


@dataclass(frozen=True)
class ModelWithModule:
    """changes: to config.json. copies: whether the module has an embedding and a head of its own, as published; own:
    whether these are other ones than the model's.
    """

    changes: dict[str, Any] = field(default_factory=dict)
    copies: bool = True
    own: bool = False

    def build(self) -> transformers.PreTrainedModel:
        """The model, with the module's decoder layer as its last one."""
        changes = {**TINY_MODELS["deepseek-v3"].changes, **self.changes, "num_hidden_layers": NUM_LAYERS + 1}
        return TinyModel("DeepseekV3", changes).build()

    def tensors(self, model: transformers.PreTrainedModel) -> dict[str, Tensor]:
        """What the module has beside that layer."""
        torch.manual_seed(5)
        size = model.config.hidden_size
        found = {name: 1 + 0.15 * torch.randn(size) for name in ("enorm", "hnorm", "shared_head.norm")}
        found["eh_proj"] = 0.15 * torch.randn(size, 2 * size)
        if self.copies:
            weights = model.state_dict()
            found["embed_tokens"] = weights["model.embed_tokens.weight"].clone()
            found["shared_head.head"] = weights["lm_head.weight"].clone()
            if self.own:
                found["embed_tokens"] += 0.15 * torch.randn_like(found["embed_tokens"])
                found["shared_head.head"] += 0.15 * torch.randn_like(found["shared_head.head"])
        return found

    def save(self, path: Path, model: transformers.PreTrainedModel | None = None) -> Path:
        """model: what `build` has made."""
        model = model or self.build()
        return save_with_module(path, model, self.tensors(model))


def save_with_module(path: Path, model: transformers.PreTrainedModel, tensors: Mapping[str, Tensor]) -> Path:
    """tensors: of the module beside its layer, the model's last one."""
    model.save_pretrained(path)
    config = json.loads((path / "config.json").read_text())
    config |= {"num_hidden_layers": NUM_LAYERS, "num_nextn_predict_layers": 1}
    (path / "config.json").write_text(json.dumps(config))
    file = path / "model.safetensors"
    save_file({**load_file(file), **{f"{LAYER}.{name}.weight": each for name, each in tensors.items()}}, file)
    return path


class Reference:
    """The module over whole sequences, by transformers' decoder layer."""

    def __init__(self, model: transformers.PreTrainedModel, tensors: Mapping[str, Tensor]) -> None:
        self.model, self.tensors, self.eps = model, tensors, model.config.rms_norm_eps
        self.embedding = tensors.get("embed_tokens", model.state_dict()["model.embed_tokens.weight"])
        self.head = tensors.get("shared_head.head", model.state_dict()["lm_head.weight"])

    def norm(self, x: Tensor, name: str) -> Tensor:
        return functional.rms_norm(x, x.shape[-1:], self.tensors[name], self.eps)

    @torch.no_grad()
    def outputs(self, token_ids: Sequence[int], hidden: Tensor) -> Tensor:
        """o of all positions. token_ids: those behind the positions. hidden: (n, hidden)."""
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
        """The likeliest tokens behind `token_ids`."""
        known = list(token_ids)
        states = self.model(torch.tensor([known[:-1]]), output_hidden_states=True).hidden_states[NUM_LAYERS][0]
        hidden = self.model.model.norm(states)
        for _ in range(count):
            outputs = self.outputs(known[1:], hidden)
            known.append(int((outputs[-1] @ self.head.T).argmax()))
            hidden = torch.cat([hidden, outputs[-1:]])
        return known[len(token_ids) :]
