"""Random EAGLE-3 heads in the published layout, and a float32 reference of their drafts by the layer's definition."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from tests.engine.tiny_models import VOCAB_SIZE

DRAFT_VOCAB = 120
CONFIG = {
    "architectures": ["LlamaForCausalLMEagle3"], "model_type": "llama", "hidden_size": 48, "num_hidden_layers": 1,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "intermediate_size": 64,
    "max_position_embeddings": 64, "rms_norm_eps": 1e-5, "rope_theta": 5000.0, "hidden_act": "silu",
}  # fmt: skip


@dataclass(frozen=True)
class RandomHead:
    """changes: to config.json. draft_vocab: 0: the model's vocabulary. vocab_size, model_size: of the model."""

    changes: dict[str, Any] = field(default_factory=dict)
    draft_vocab: int = DRAFT_VOCAB
    has_embedding: bool = False
    seed: int = 3
    vocab_size: int = VOCAB_SIZE
    model_size: int = 48  # as SHAPE has it

    @property
    def config(self) -> dict[str, Any]:
        return {**CONFIG, "vocab_size": self.vocab_size, "draft_vocab_size": self.draft_vocab, **self.changes}

    def tensors(self) -> dict[str, Tensor]:
        torch.manual_seed(self.seed)
        config = self.config
        hidden, inner, size = config["hidden_size"], config["intermediate_size"], config["head_dim"]
        queries, kv = config["num_attention_heads"] * size, config["num_key_value_heads"] * size
        shapes = {
            "fc": (hidden, 3 * self.model_size),
            "midlayer.self_attn.q_proj": (queries, 2 * hidden),
            "midlayer.self_attn.k_proj": (kv, 2 * hidden),
            "midlayer.self_attn.v_proj": (kv, 2 * hidden),
            "midlayer.self_attn.o_proj": (hidden, queries),
            "midlayer.mlp.gate_proj": (inner, hidden),
            "midlayer.mlp.up_proj": (inner, hidden),
            "midlayer.mlp.down_proj": (hidden, inner),
            "lm_head": (self.draft_vocab or self.vocab_size, hidden),
        }
        found = {f"{name}.weight": torch.randn(shape) * 0.15 for name, shape in shapes.items()}
        norms = ("midlayer.input_layernorm", "midlayer.hidden_norm", "midlayer.post_attention_layernorm", "norm")
        found |= {f"{name}.weight": 1 + 0.15 * torch.randn(hidden) for name in norms}
        if self.has_embedding:
            found["embed_tokens.weight"] = torch.randn(self.vocab_size, hidden) * 0.15
        if self.draft_vocab:
            ids = torch.randperm(self.vocab_size)[: self.draft_vocab].sort().values
            found["d2t"] = ids - torch.arange(self.draft_vocab)
            found["t2d"] = torch.zeros(self.vocab_size, dtype=torch.bool).index_fill_(0, ids, True)
        return found

    def save(self, path: Path) -> Path:
        path.mkdir(parents=True, exist_ok=True)
        (path / "config.json").write_text(json.dumps(self.config))
        save_file(self.tensors(), path / "model.safetensors")
        return path


class Reference:
    """Computes the head over whole sequences, as a decoder layer is usually written."""

    def __init__(self, config: dict[str, Any], tensors: dict[str, Tensor], embedding: Tensor) -> None:
        self.config, self.embedding = config, tensors.get("embed_tokens.weight", embedding)
        self.tensors = tensors

    def weight(self, name: str) -> Tensor:
        return self.tensors[f"{name}.weight"]

    def norm(self, x: Tensor, name: str) -> Tensor:
        return x * torch.rsqrt((x * x).mean(-1, keepdim=True) + self.config["rms_norm_eps"]) * self.weight(name)

    def rotated(self, x: Tensor) -> Tensor:
        """Rotate x: (n, heads, head_dim), at positions 0 to n - 1."""
        half = x.shape[-1] // 2
        frequencies = self.config["rope_theta"] ** (-torch.arange(half) / half)
        angles = (torch.arange(len(x))[:, None] * frequencies)[:, None]
        a, b = x[..., :half], x[..., half:]
        return torch.cat([a * angles.cos() - b * angles.sin(), b * angles.cos() + a * angles.sin()], -1)

    def layer(self, token_ids: Sequence[int], hidden: Tensor) -> Tensor:
        """Compute o of all positions. token_ids: the token after each position. hidden: (n, hidden)."""
        layer, size = "midlayer", self.config["head_dim"]
        normed = self.norm(hidden, f"{layer}.hidden_norm")
        x = torch.cat([self.norm(self.embedding[list(token_ids)], f"{layer}.input_layernorm"), normed], -1)
        q, k, v = (
            (x @ self.weight(f"{layer}.self_attn.{name}_proj").T).view(len(x), -1, size) for name in ("q", "k", "v")
        )
        q, k = self.rotated(q), self.rotated(k)
        repeats = q.shape[1] // k.shape[1]
        k, v = k.repeat_interleave(repeats, 1), v.repeat_interleave(repeats, 1)
        scores = torch.einsum("qhd,khd->hqk", q, k) / size**0.5
        scores = scores + torch.full(scores.shape[1:], float("-inf")).triu(1)
        attended = torch.einsum("hqk,khd->qhd", scores.softmax(-1), v).flatten(1)
        residual = normed if self.config.get("norm_before_residual") else hidden
        residual = residual + attended @ self.weight(f"{layer}.self_attn.o_proj").T
        normed = self.norm(residual, f"{layer}.post_attention_layernorm")
        gate, up = (normed @ self.weight(f"{layer}.mlp.{name}_proj").T for name in ("gate", "up"))
        return residual + (gate * torch.sigmoid(gate) * up) @ self.weight(f"{layer}.mlp.down_proj").T

    def drafts(self, token_ids: Sequence[int], states: Tensor, count: int) -> list[int]:
        """Return the likeliest tokens after `token_ids`.

        states: (len(token_ids) - 1, 3 * model's hidden), the three layers' inputs of all tokens but the last.
        """
        known, hidden = list(token_ids), states @ self.weight("fc").T
        for _ in range(count):
            outputs = self.layer(known[1:], hidden)
            index = int((self.norm(outputs[-1:], "norm") @ self.weight("lm_head").T).argmax())
            known.append(index + int(self.tensors["d2t"][index]) if "d2t" in self.tensors else index)
            hidden = torch.cat([hidden, outputs[-1:]])
        return known[len(token_ids) :]
