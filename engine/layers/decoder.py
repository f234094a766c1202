"""The decoder that dense model families share: norm, attention, norm, gated MLP, with residuals.

Plain objects over weight tensors, q/k/v and gate/up fused into one product each. Where K and V live, and which tokens
belong to which sequence, only the attention backend knows; it gets its metadata as an argument.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from engine.cpu.pool_attention import AttentionBackend, AttentionMetadata
from engine.layers.linear import Linear, LinearMap
from engine.layers.rotary import rotary_table
from engine.layers.weights import WeightSource
from engine.models.config import ModelConfig
from kernels.rms_norm import rms_norm
from kernels.rotary import rotate_
from kernels.silu_mul import silu_mul


@dataclass(slots=True)
class DecoderLayer:
    """Weights of one layer."""

    attention_norm: Tensor  # (hidden,)
    qkv: LinearMap  # hidden -> (heads + 2 kv_heads) * head_dim, in the order q, k, v
    qk_norm: Tensor | None  # (heads + kv_heads, head_dim)
    attention_output: LinearMap
    mlp_norm: Tensor
    gate_up: LinearMap  # hidden -> 2 intermediate
    down: LinearMap


@dataclass(slots=True)
class DecoderModel:
    """A whole model: tokens to hidden states, hidden states to logits.

    The sums over layers are kept in float32; a linear map gets its inputs in the dtype of the norm before it.
    """

    config: ModelConfig
    embedding: Tensor  # (vocab, hidden)
    layers: list[DecoderLayer]
    final_norm: Tensor
    lm_head: LinearMap
    rotary: Tensor  # (max_position_embeddings, 2, head_dim)

    def forward(
        self, token_ids: Tensor, positions: Tensor, backend: AttentionBackend, metadata: AttentionMetadata
    ) -> Tensor:
        """token_ids, positions (num_tokens,) -> hidden states (num_tokens, hidden) before the final norm, float32."""
        config = self.config
        eps, head_dim = config.rms_norm_eps, config.head_dim
        num_tokens = token_ids.shape[0]
        num_qk_heads = config.num_heads + config.num_kv_heads
        table = self.rotary[positions]
        cos, sin = table[:, :1], table[:, 1:]
        hidden = functional.embedding(token_ids, self.embedding).float()
        for index, layer in enumerate(self.layers):
            qkv = layer.qkv(rms_norm(hidden, layer.attention_norm, eps))
            qkv = qkv.view(num_tokens, -1, head_dim)
            qk = qkv[:, :num_qk_heads]
            if layer.qk_norm is not None:
                qk.copy_(rms_norm(qk, layer.qk_norm, eps))
            rotate_(qk, cos, sin)
            hidden += layer.attention_output(backend.attend(index, qkv, metadata))
            gate_up = layer.gate_up(rms_norm(hidden, layer.mlp_norm, eps))
            hidden += layer.down(silu_mul(gate_up))
        return hidden

    def logits(self, hidden: Tensor) -> Tensor:
        """Hidden states (rows, hidden) as `forward` returns them -> logits (rows, vocab)."""
        return self.lm_head(rms_norm(hidden, self.final_norm, self.config.rms_norm_eps))

    def replace_linear_maps(self, convert: Callable[[LinearMap], LinearMap]) -> None:
        """Put `convert(map)` in the place of every linear map, the output projection last."""
        for layer in self.layers:
            layer.qkv = convert(layer.qkv)
            layer.attention_output = convert(layer.attention_output)
            layer.gate_up = convert(layer.gate_up)
            layer.down = convert(layer.down)
        self.lm_head = convert(self.lm_head)


OnLayer = Callable[[DecoderLayer], None]
"""Called with each layer as soon as it is made, while the next ones are not in memory yet."""


def build_decoder(config: ModelConfig, weights: WeightSource, on_layer: OnLayer | None = None) -> DecoderModel:
    """Ask `weights` for everything under its Hugging Face name."""
    hidden = config.hidden_size
    embedding = weights.take("model.embed_tokens.weight", (config.vocab_size, hidden))
    layers = []
    for index in range(config.num_layers):
        layers.append(_build_layer(config, weights, f"model.layers.{index}."))
        if on_layer is not None:
            on_layer(layers[-1])
    final_norm = weights.take("model.norm.weight", (hidden,))
    if config.tie_word_embeddings:
        head = Linear(embedding, names=("model.embed_tokens.weight",))
    else:
        head = Linear(weights.take("lm_head.weight", (config.vocab_size, hidden)), names=("lm_head.weight",))
    on_cpu = embedding.device.type == "cpu"
    rotary = rotary_table(
        config.rope,
        config.head_dim,
        config.max_position_embeddings,
        torch.float32 if on_cpu else embedding.dtype,
        embedding.device,
    )
    return DecoderModel(config, embedding, layers, final_norm, head, rotary)


def _build_layer(config: ModelConfig, weights: WeightSource, prefix: str) -> DecoderLayer:
    hidden, q_size, kv_size, inner = config.hidden_size, config.q_size, config.kv_size, config.intermediate_size

    def fused(names: list[tuple[str, int]], in_size: int, bias: bool) -> Linear:
        parts = [weights.take(f"{prefix}{name}.weight", (size, in_size)) for name, size in names]
        biases = [weights.take(f"{prefix}{name}.bias", (size,)) for name, size in names] if bias else []
        full_names = tuple(f"{prefix}{name}.weight" for name, _ in names)
        if len(names) == 1:
            return Linear(parts[0], biases[0] if bias else None, full_names)
        return Linear(_joined(parts), _joined(biases) if bias else None, full_names)

    qkv_names = [("self_attn.q_proj", q_size), ("self_attn.k_proj", kv_size), ("self_attn.v_proj", kv_size)]
    qk_norm = None
    if config.qk_norm:
        q_norm = weights.take(f"{prefix}self_attn.q_norm.weight", (config.head_dim,))
        k_norm = weights.take(f"{prefix}self_attn.k_norm.weight", (config.head_dim,))
        qk_norm = _joined([q_norm.expand(config.num_heads, -1), k_norm.expand(config.num_kv_heads, -1)])
    return DecoderLayer(
        attention_norm=weights.take(f"{prefix}input_layernorm.weight", (hidden,)),
        qkv=fused(qkv_names, hidden, config.attention_bias),
        qk_norm=qk_norm,
        attention_output=fused([("self_attn.o_proj", hidden)], q_size, config.attention_output_bias),
        mlp_norm=weights.take(f"{prefix}post_attention_layernorm.weight", (hidden,)),
        gate_up=fused([("mlp.gate_proj", inner), ("mlp.up_proj", inner)], hidden, config.mlp_bias),
        down=fused([("mlp.down_proj", hidden)], inner, config.mlp_bias),
    )


def _joined(parts: Sequence[Tensor]) -> Tensor:
    """Rows of all parts. Without storage nothing is computed: the first operation on "meta" imports for 2 s."""
    if parts[0].device.type == "meta":
        rows = sum(part.shape[0] for part in parts)
        return torch.empty(rows, *parts[0].shape[1:], dtype=parts[0].dtype, device="meta")
    return torch.cat(list(parts))
