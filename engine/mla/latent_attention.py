"""Multi-head latent attention (MLA): K and V of all heads are linear functions of one short vector per token.

    [c | k_rope] = W_kv_a x    c normed, k_rope rotated: the latent that the pool keeps of a token
    k_h = [W_UK_h c | k_rope]  v_h = W_UV_h c               for each head h; W_UK_h and W_UV_h are rows of W_kv_b
    q_h = [q_nope | q_rope]    of W_q x, or of W_q_b norm(W_q_a x)
    y   = W_o [softmax(q_h k_h^T * scale) v_h]_h

Three forms of the same function, which differ in what is kept and when it is expanded
(docs/decisions/latent-attention.md):

    absorbed   latents are kept. q_nope W_UK_h attends to them as to one KV head, also for the values; then W_UV_h
    latent     latents are kept, and k_h and v_h of the whole context are computed whenever it is attended to
    naive      k_h and v_h are kept, as in grouped-query attention

`Step.attend` gets [q | c | k_rope] before any of this, so a backend may choose another form for other rows.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Iterator

import torch
from torch import Tensor
from torch.nn import functional

from engine.layers.attention import AttentionBlock
from engine.layers.block import LinearRef, Step, joined, take_linear
from engine.layers.linear import Linear
from engine.layers.rotary import Rotation
from engine.layers.weights import Partition, WeightSource
from engine.models.config import ModelConfig
from kernels.elementwise import rms_norm, rotate_

LATENT_NORM_EPS = 1e-6  # whatever eps the config has


class LatentAttention(AttentionBlock):
    """Latent attention. qkv_a: W_q_a, or W_q if q is not compressed, and W_kv_a in one GEMM. q_b: W_q_b or None.

    kv_b: (heads * (nope_dim + v_dim), rank), never quantized, so that all forms have the same numbers. Rows of
    rotated dimensions are in the order of `rotate_`: halves instead of pairs.
    """

    gpu_ops = "engine.mla.gpu_ops"

    def __init__(self, config: ModelConfig, weights: WeightSource, name: str, norm: str, layer: int) -> None:
        latent = config.latent
        assert latent is not None, "the family's adapt_config sets it"
        self.layer = layer
        self.eps = config.rms_norm_eps
        self.num_heads, self.rank = config.num_heads, latent.kv_lora_rank
        self.nope_dim, self.rope_dim, self.v_dim = latent.nope_head_dim, latent.rope_head_dim, latent.v_head_dim
        self.qk_dim = self.nope_dim + self.rope_dim
        self.q_factor = latent.mscale**2 * math.sqrt(self.query_width / self.qk_dim)  # backends divide by its root
        self.norm = weights.take(f"{norm}.weight", (config.hidden_size,))

        hidden, q_size, rank = config.hidden_size, self.num_heads * self.qk_dim, latent.q_lora_rank
        kv_a = take_linear(
            weights, [f"{name}.kv_a_proj_with_mqa"], [self.rank + self.rope_dim], hidden, config.attention_bias,
            Partition.NONE,
        )  # fmt: skip
        q_name, q_width = f"{name}.q_proj", hidden
        self.q_b: Linear | None = None
        self.q_norm: Tensor | None = None
        if rank is not None:
            q_a = take_linear(weights, [f"{name}.q_a_proj"], [rank], hidden, config.attention_bias, Partition.NONE)
            self.q_norm = weights.take(f"{name}.q_a_layernorm.weight", (rank,))
            q_name, q_width = f"{name}.q_b_proj", rank
        q = take_linear(weights, [q_name], [q_size], q_width, bias=False, partition=Partition.COLUMNS)
        if latent.rope_interleave:
            q = with_halves(q, self.qk_dim, self.rope_dim)
            kv_a = with_halves(kv_a, self.rank + self.rope_dim, self.rope_dim)
        if rank is not None:
            self.q_b = q
            q = q_a
        self.qkv_a: Linear = stacked(q, kv_a)
        self.kv_norm = weights.take(f"{name}.kv_a_layernorm.weight", (self.rank,))
        self.kv_b = weights.take(
            f"{name}.kv_b_proj.weight", (self.num_heads * (self.nope_dim + self.v_dim), self.rank), Partition.COLUMNS
        )
        self.output: Linear = take_linear(
            weights, [f"{name}.o_proj"], [hidden], self.num_heads * self.v_dim, config.attention_output_bias,
            Partition.ROWS,
        )  # fmt: skip

    def __call__(self, x: Tensor, step: Step) -> Tensor:
        y = self.qkv_a(x)
        q, latents = y[:, : -self.rank - self.rope_dim], y[:, -self.rank - self.rope_dim :]
        if self.q_b is not None:
            assert self.q_norm is not None
            q = self.q_b(rms_norm(q, self.q_norm, LATENT_NORM_EPS))
        c = rms_norm(latents[:, : self.rank], self.kv_norm, LATENT_NORM_EPS)
        return self.output(step.attend(self, torch.cat([q, c, latents[:, self.rank :]], dim=1)))

    @property
    @abstractmethod
    def query_width(self) -> int:
        """The width of a query from `heads`; a backend scales scores by the inverse of its square root."""

    @property
    def w_uk(self) -> Tensor:
        """W_UK (num_heads, nope_dim, rank)."""
        return self.kv_b.view(self.num_heads, -1, self.rank)[:, : self.nope_dim]

    @property
    def w_uv(self) -> Tensor:
        """W_UV (num_heads, v_dim, rank)."""
        return self.kv_b.view(self.num_heads, -1, self.rank)[:, self.nope_dim :]

    def rotated(self, qkv: Tensor, rotation: Rotation) -> tuple[Tensor, Tensor]:
        """Rotate in place: scaled queries (num_tokens, num_heads, qk_dim), latents (num_tokens, rank + rope_dim)."""
        q_size = self.num_heads * self.qk_dim
        q, latents = qkv[:, :q_size].view(-1, self.num_heads, self.qk_dim), qkv[:, q_size:]
        rotate_(q[..., self.nope_dim :], *rotation)
        rotate_(latents[:, None, self.rank :], *rotation)
        if self.q_factor != 1.0:
            q.mul_(self.q_factor)
        return q, latents

    def expanded(self, latents: Tensor) -> tuple[Tensor, Tensor]:
        """Expand latents (n, rank + rope_dim) to keys (num_heads, n, qk_dim) and values (num_heads, n, v_dim)."""
        c, k_rope = latents[:, : self.rank], latents[:, self.rank :].expand(self.num_heads, -1, -1)
        kv = functional.linear(c, self.kv_b).view(c.shape[0], self.num_heads, -1).transpose(0, 1)
        return torch.cat([kv[..., : self.nope_dim], k_rope], dim=2), kv[..., self.nope_dim :]

    def outputs(self, attended: Tensor) -> Tensor:
        return attended[..., : self.v_dim].flatten(1)

    def linears(self) -> Iterator[LinearRef]:
        yield LinearRef(self, "qkv_a")
        if self.q_b is not None:
            yield LinearRef(self, "q_b")
        yield LinearRef(self, "output")


class AbsorbedLatentAttention(LatentAttention):
    """Applies W_UK to queries and W_UV to outputs; in between, all queries share one KV head, the latents."""

    @property
    def query_width(self) -> int:
        return self.rank + self.rope_dim

    def heads(self, qkv: Tensor, rotation: Rotation) -> tuple[Tensor, Tensor]:
        q, latents = self.rotated(qkv, rotation)
        q_nope = (q[..., : self.nope_dim].transpose(0, 1) @ self.w_uk).transpose(0, 1)
        return torch.cat([q_nope, q[..., self.nope_dim :]], dim=2), latents[:, None, None]

    def context(self, kv: Tensor) -> tuple[Tensor, Tensor]:
        return kv[0], kv[0, ..., : self.rank]

    def outputs(self, attended: Tensor) -> Tensor:
        return (attended.transpose(0, 1) @ self.w_uv.transpose(1, 2)).transpose(0, 1).flatten(1)


class ExpandedLatentAttention(LatentAttention):
    """Expands K and V of the context whenever it is attended to: more work per key, less per query."""

    @property
    def query_width(self) -> int:
        return self.qk_dim

    def heads(self, qkv: Tensor, rotation: Rotation) -> tuple[Tensor, Tensor]:
        q, latents = self.rotated(qkv, rotation)
        return q, latents[:, None, None]

    def context(self, kv: Tensor) -> tuple[Tensor, Tensor]:
        return self.expanded(kv[0, 0].to(self.kv_b.dtype))


class NaiveLatentAttention(LatentAttention):
    """Expands K and V once and keeps them; V is padded to the width of K."""

    @property
    def query_width(self) -> int:
        return self.qk_dim

    def heads(self, qkv: Tensor, rotation: Rotation) -> tuple[Tensor, Tensor]:
        q, latents = self.rotated(qkv, rotation)
        keys, values = self.expanded(latents)
        return q, torch.stack([keys, functional.pad(values, (0, self.qk_dim - self.v_dim))]).permute(2, 0, 1, 3)

    def context(self, kv: Tensor) -> tuple[Tensor, Tensor]:
        return kv[0], kv[1]


FORMS: dict[str, type[LatentAttention]] = {
    "absorbed": AbsorbedLatentAttention, "latent": ExpandedLatentAttention, "naive": NaiveLatentAttention,
}  # fmt: skip


def latent_attention(config: ModelConfig, weights: WeightSource, name: str, norm: str, layer: int) -> LatentAttention:
    """Return the block in the form that the config names."""
    assert config.latent is not None, "the family's adapt_config sets it"
    return FORMS[config.latent.form](config, weights, name, norm, layer)


def with_halves(linear: Linear, head_dim: int, rope_dim: int) -> Linear:
    """Order each head's last `rope_dim` outputs as halves (x0 x1 .. y0 y1 ..) instead of pairs (x0 y0 x1 y1 ..).

    `rotate_` rotates halves. The rows are no longer those of a stored weight.
    """

    def halves(rows: Tensor) -> Tensor:
        if rows.device.type == "meta":  # see `joined`
            return rows
        heads = rows.view(-1, head_dim, *rows.shape[1:])
        plain, pairs = heads[:, : head_dim - rope_dim], heads[:, head_dim - rope_dim :]
        return torch.cat([plain, pairs[:, ::2], pairs[:, 1::2]], dim=1).view(rows.shape)

    return Linear(halves(linear.weight), None if linear.bias is None else halves(linear.bias))


def stacked(first: Linear, second: Linear) -> Linear:
    """Join two layers that read the same x to one with the outputs of both."""
    bias = None
    if first.bias is not None or second.bias is not None:
        biases = [x.weight.new_zeros(x.weight.shape[0]) if x.bias is None else x.bias for x in (first, second)]
        bias = joined(biases)
    names = (*first.names, *second.names) if first.names and second.names else ()
    return Linear(joined([first.weight, second.weight]), bias, names)
