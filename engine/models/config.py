"""Shape and constants of a decoder model.

Knows no file format (`hf_config` and `gguf_config` read those) and no family: where a family differs, its
`adapt_config` corrects the config (`engine/models/registry.py`).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Protocol

from common.errors import ConfigError

if TYPE_CHECKING:
    from torch import Tensor

    from engine.mla.config import LatentConfig
    from engine.moe.config import MoeConfig

PLAIN_BITS = 16  # bits of a weight that is not quantized


class RopeScaling(Protocol):
    """A rule that stretches frequencies beyond the trained context, as plain data."""

    def within(self, context_length: int) -> RopeScaling:
        """Return the rule for a model that is used for contexts up to this length.

        K in the pool is already rotated, so the rule cannot change within a sequence.
        """
        ...

    def scaled(self, frequencies: Tensor, theta: float) -> tuple[Tensor, float]:
        """Return the stretched angles per position, and the factor on cosines and sines. Raises ConfigError."""
        ...


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """Rotary embedding; `engine/layers/rotary.py` computes the table.

    theta: the base. partial: the share of each head's dimensions, the first ones, that is rotated.
    """

    theta: float = 10000.0
    partial: float = 1.0
    scaling: RopeScaling | None = None

    def rotated(self, head_dim: int) -> int:
        """Number of rotated dimensions of a head."""
        return int(head_dim * self.partial)

    def within(self, context_length: int) -> RopeConfig:
        """See RopeScaling."""
        return self if self.scaling is None else replace(self, scaling=self.scaling.within(context_length))


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """Shape and constants of a decoder with grouped-query or latent attention, and gated MLPs or experts.

    num_kv_heads, head_dim: in the pool. sliding_window: tokens that layers look back, except `full_layers`;
    local_rope: rotary embedding of the layers with a window, if it differs. is_causal: if false, tokens also attend
    to later ones, and a window reaches to both sides. query_scale: a factor on 1/sqrt(head_dim). unused_weights:
    prefixes of names that a checkpoint may have although the model does not use them. expert_slots: each layer's
    placement of experts, if any, see `engine.expert_balancing.placement`. linear_bits: bits of a weight in blocks,
    if they stay as a quantized checkpoint stores them; embedding and head have 16. On a rank of a tensor-parallel
    model, heads, intermediate sizes and vocabulary are that rank's (`tensor_parallel.rank_config`).
    """

    architecture: str
    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    rms_norm_eps: float
    rope: RopeConfig
    max_position_embeddings: int
    tie_word_embeddings: bool = False
    attention_bias: bool = False  # q, k and v
    attention_output_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    moe: MoeConfig | None = None
    latent: LatentConfig | None = None
    sliding_window: int | None = None
    full_layers: tuple[int, ...] = ()
    local_rope: RopeConfig | None = None
    query_scale: float = 1.0
    embedding_scale: float = 1.0
    linear_bits: int = PLAIN_BITS
    eos_token_ids: tuple[int, ...] = ()
    unused_weights: tuple[str, ...] = ()
    expert_slots: tuple[tuple[int, ...], ...] = ()
    is_causal: bool = True

    @property
    def rope_dim(self) -> int:
        """Dimensions of a head that the rotary table covers."""
        return self.head_dim if self.latent is None else self.latent.rope_head_dim

    @property
    def num_kv_planes(self) -> int:
        """2 for K and V, 1 for latents."""
        return 2 if self.latent is None or self.latent.form == "naive" else 1

    @property
    def windows(self) -> tuple[int, ...]:
        """Tokens that each layer looks back, 0: all. Empty if no layer has a window."""
        if self.sliding_window is None:
            return ()
        return tuple(0 if layer in self.full_layers else self.sliding_window for layer in range(self.num_layers))

    @property
    def q_size(self) -> int:
        return self.num_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        return self.num_kv_heads * self.head_dim

    def context_length(self, max_model_len: int) -> int:
        """Return the longest sequence to serve: `max_model_len`, or with 0 the model's maximum.

        Raises ConfigError when `max_model_len` exceeds that maximum.
        """
        limit = self.max_position_embeddings
        if max_model_len > limit:
            raise ConfigError(
                f"--max-model-len {max_model_len} exceeds the model's {limit} positions: choose at most {limit}"
            )
        return max_model_len or limit


def check_config(config: ModelConfig) -> None:
    """Raise ConfigError for shapes that do not fit together."""
    if config.num_heads % config.num_kv_heads:
        raise ConfigError(f"{config.num_heads} query heads cannot share {config.num_kv_heads} KV heads")
    rotated = config.rope.rotated(config.head_dim)
    if config.head_dim % 2 or rotated % 2 or not 0 < rotated <= config.head_dim:
        raise ConfigError(f"rotary embedding of {rotated} of {config.head_dim} numbers a head: it needs pairs")
