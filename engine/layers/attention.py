"""Grouped-query attention: y = W_o attend(rotate(W_qkv x)), optionally with an RMS norm over each head of q and k.

The part between the two GEMMs needs the KV of earlier tokens, so an `AttentionBackend` computes it.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Protocol

from torch import Tensor

from engine.layers.block import Block, LinearRef, Step, joined, take_linear
from engine.layers.linear import Linear
from engine.layers.rotary import Rotation
from engine.layers.weights import Partition, WeightSource
from engine.models.config import ModelConfig
from kernels.elementwise import rms_norm, rotate_

if TYPE_CHECKING:
    from engine.cpu.batch import StepBatch


class AttentionBlock(Block):
    """A block with K and V in the pool, and the conversions between its tensors and those of an attention kernel.

    layer: index of its K and V in the pool. sinks: (num_heads,), or None; softcap: bound of the absolute scores,
    0: none; for both see `kernels/paged_attention.py`.
    """

    layer: int
    sinks: Tensor | None = None
    softcap: float = 0.0

    @property
    def needs_all_tokens(self) -> bool:
        return True  # later tokens attend to them

    @abstractmethod
    def heads(self, qkv: Tensor, rotation: Rotation) -> tuple[Tensor, Tensor]:
        """Norm and rotate the tensor that `Step.attend` was given; it may be changed.

        Returns queries (num_tokens, num_heads, head_dim) and the KV that the pool stores for each token (num_tokens,
        planes, kv_heads, head_dim).
        """

    @abstractmethod
    def context(self, kv: Tensor) -> tuple[Tensor, Tensor]:
        """Return the keys and values of a sequence from its KV in the pool.

        kv: as `gather_kv` returns it. Returns (kv_heads, n, head_dim) and (kv_heads, n, value_dim).
        """

    @abstractmethod
    def outputs(self, attended: Tensor) -> Tensor:
        """Return the output projection's input (num_tokens, n) from heads (num_tokens, num_heads, value_dim)."""


class Attention(AttentionBlock):
    """Grouped-query attention with one GEMM for q, k and v. qk_norm: (heads + kv_heads, head_dim) or None."""

    def __init__(self, config: ModelConfig, weights: WeightSource, name: str, norm: str, layer: int) -> None:
        self.layer = layer
        self.num_heads, self.num_kv_heads, self.head_dim = config.num_heads, config.num_kv_heads, config.head_dim
        self.eps = config.rms_norm_eps
        self.qk_norm: Tensor | None = None
        if config.qk_norm:
            q_norm = weights.take(f"{name}.q_norm.weight", (config.head_dim,))
            k_norm = weights.take(f"{name}.k_norm.weight", (config.head_dim,))
            self.qk_norm = joined([q_norm.expand(config.num_heads, -1), k_norm.expand(config.num_kv_heads, -1)])
        self.norm = weights.take(f"{norm}.weight", (config.hidden_size,))
        names, sizes = [f"{name}.{part}_proj" for part in "qkv"], (config.q_size, config.kv_size, config.kv_size)
        self.qkv: Linear = take_linear(
            weights, names, sizes, config.hidden_size, config.attention_bias, Partition.COLUMNS
        )
        self.output: Linear = take_linear(
            weights,
            [f"{name}.o_proj"],
            [config.hidden_size],
            config.q_size,
            config.attention_output_bias,
            Partition.ROWS,
        )

    def __call__(self, x: Tensor, step: Step) -> Tensor:
        return self.output(step.attend(self, self.qkv(x).view(x.shape[0], -1, self.head_dim)))

    def heads(self, qkv: Tensor, rotation: Rotation) -> tuple[Tensor, Tensor]:
        qk = qkv[:, : self.num_heads + self.num_kv_heads]
        if self.qk_norm is not None:
            qk.copy_(rms_norm(qk, self.qk_norm, self.eps))
        rotate_(qk, *rotation)
        q, kv = qkv[:, : self.num_heads], qkv[:, self.num_heads :]
        return q, kv.view(-1, 2, self.num_kv_heads, qkv.shape[2])

    def context(self, kv: Tensor) -> tuple[Tensor, Tensor]:
        return kv[0], kv[1]

    def outputs(self, attended: Tensor) -> Tensor:
        return attended.flatten(1)

    def linears(self) -> Iterator[LinearRef]:
        yield LinearRef(self, "qkv")
        yield LinearRef(self, "output")


class AttentionBackend(Protocol):
    """Stores K and V and computes attention: one call per layer for prompts and decode rows alike.

    Only the backend reads its metadata. Rotation is part of `attend`, so that a backend may fuse it with storing K
    and V.
    """

    @property
    def name(self) -> str:
        """The name that a worker reports."""
        ...

    def plan(self, batch: StepBatch, inputs: Tensor) -> Any:
        """Return the step's metadata, which all layers attend with. inputs: `batch.inputs` on the device."""
        ...

    def attend(self, block: AttentionBlock, qkv: Tensor, metadata: Any) -> Tensor:
        """Norm and rotate q and k by `block`, store the KV of its layer in the pool, attend causally.

        qkv: (num_tokens, heads + 2 kv_heads, head_dim), or another shape that `block` defines; may be changed.
        Returns the input of the output projection (num_tokens, n).
        """
        ...
