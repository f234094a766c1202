"""Grouped-query attention: y = W_o attend(rotate(W_qkv x)), with an RMS norm over each head of q and k if wanted.

What is between the two GEMMs needs the KV of earlier tokens, so an `AttentionBackend` does it.
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
    """A block with K and V in the pool, and how a backend gets from what the block gives it to attention and back.

    layer: whose K and V these are, in the pool. sinks: (num_heads,), see `kernels/paged_attention.py`, or None.
    softcap: the bound of a score's size, likewise; 0: none.
    """

    layer: int
    sinks: Tensor | None = None
    softcap: float = 0.0

    @property
    def needs_all_tokens(self) -> bool:
        return True  # later ones attend to them

    @abstractmethod
    def heads(self, qkv: Tensor, rotation: Rotation) -> tuple[Tensor, Tensor]:
        """Norm and rotate what `Step.attend` was given; it may be changed.

        Returns queries (num_tokens, num_heads, head_dim) and what the pool keeps of each token (num_tokens, planes,
        kv_heads, head_dim).
        """

    @abstractmethod
    def context(self, kv: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values of a sequence from what the pool keeps of it.

        kv: as `gather_kv` returns it. Returns (kv_heads, n, head_dim) and (kv_heads, n, value_dim).
        """

    @abstractmethod
    def outputs(self, attended: Tensor) -> Tensor:
        """The output projection's input (num_tokens, n) from heads (num_tokens, num_heads, value_dim)."""


class Attention(AttentionBlock):
    """q, k and v are one GEMM.

    layer: whose K and V these are, in the pool. qk_norm: (heads + kv_heads, head_dim) or None.
    """

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

    def norm_and_rotate_(self, qkv: Tensor, rotation: Rotation) -> None:
        """Norm q and k, if the model does, and rotate them, in place: (num_tokens, heads + 2 kv_heads, head_dim)."""
        qk = qkv[:, : self.num_heads + self.num_kv_heads]
        if self.qk_norm is not None:
            qk.copy_(rms_norm(qk, self.qk_norm, self.eps))
        rotate_(qk, *rotation)

    def heads(self, qkv: Tensor, rotation: Rotation) -> tuple[Tensor, Tensor]:
        self.norm_and_rotate_(qkv, rotation)
        q, kv = qkv[:, : self.num_heads], qkv[:, self.num_heads :]
        return q, kv.view(-1, 2, self.num_kv_heads, qkv.shape[2])

    def context(self, kv: Tensor) -> tuple[Tensor, Tensor]:
        return kv[0], kv[1]

    def outputs(self, attended: Tensor) -> Tensor:
        return attended.flatten(1)

    def linears(self) -> Iterator[LinearRef]:
        yield LinearRef(self, "qkv", "qkv")
        yield LinearRef(self, "output", "output")


class AttentionBackend(Protocol):
    """Where K and V live, and how queries attend to them: one call per layer for prompts and decode rows alike.

    No other code reads its metadata of a step. Rotation is part of `attend`, so that a backend may fuse it with what
    it does to K and V.
    """

    @property
    def name(self) -> str:
        """What a worker's facts call it."""
        ...

    def plan(self, batch: StepBatch, inputs: Tensor) -> Any:
        """Say once where the tokens of a step go, and who attends how. inputs: `batch.inputs` on the device."""
        ...

    def attend(self, block: AttentionBlock, qkv: Tensor, metadata: Any) -> Tensor:
        """Norm and rotate q and k as `block` has it, store what the pool keeps of its layer, attend causally.

        qkv: (num_tokens, heads + 2 kv_heads, head_dim), or as another block has it; may be changed. Returns the input
        of the output projection (num_tokens, n).
        """
        ...
