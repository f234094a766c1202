"""Shape and constants of a decoder model, and what a rank or a layer has of them.

Knows no file format (`hf_config` and `gguf_config` read those) and no family: what one family spells differently is
corrected by its entry in `engine/models/registry.py`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from common.errors import ConfigError
from engine.models.rope import RopeConfig

ScoreKind = Literal["softmax", "sigmoid"]
ExchangeKind = Literal["sum", "dispatch"]
PLAIN_BITS = 16  # of a weight that is not quantized


@dataclass(frozen=True, slots=True)
class MoeConfig:
    """Experts of a layer. intermediate_size: of one. normalizes_weights: the chosen experts' shares add up to one.
    dense_layers: those with a plain MLP instead. num_shared_experts: those that every token passes through, beside
    the ones it chooses; gates_shared: times a sigmoid of the token. expert_rank, expert_ranks: experts are divided
    among ranks, and this one has its part of them, whole; of shared experts it has a part of each. exchange: how
    ranks get to each other's experts; with `dispatch` rows are divided among ranks, see
    `engine.expert_parallel.divided_rows`, and all have the shared experts whole. slots: the expert in each slot of
    all ranks, see `engine.expert_balancing.placement`; empty: each once, in order. The rest is the rule by which a
    token chooses, see `engine.moe.routing`.
    """

    num_experts: int
    num_experts_per_token: int
    intermediate_size: int
    normalizes_weights: bool = True
    dense_layers: tuple[int, ...] = ()
    num_shared_experts: int = 0
    gates_shared: bool = False
    score: ScoreKind = "softmax"
    has_choice_bias: bool = False
    num_groups: int = 1
    num_chosen_groups: int = 1
    group_top: int = 1
    weight_factor: float = 1.0
    float32_router: bool = False
    swiglu_alpha: float = 1.0  # these two of experts with a clamped activation, see `engine.moe.stacked_moe`
    swiglu_limit: float = 0.0
    expert_rank: int = 0
    expert_ranks: int = 1
    exchange: ExchangeKind = "sum"
    slots: tuple[int, ...] = ()

    @property
    def num_slots(self) -> int:
        """Experts of all ranks, replicas counted."""
        return len(self.slots) or self.num_experts

    @property
    def held_slots(self) -> range:
        """Slots of this rank."""
        count = self.num_slots // self.expert_ranks
        return range(self.expert_rank * count, (self.expert_rank + 1) * count)

    def expert_of(self, slot: int) -> int:
        return self.slots[slot] if self.slots else slot

    @property
    def shared_size(self) -> int:
        """Intermediate size of all shared experts as one, as far as this rank has them."""
        size = self.num_shared_experts * self.intermediate_size
        return size // self.expert_ranks if self.exchange == "sum" else size

    def shard(self, size: int, expert_rank: int | None, exchange: ExchangeKind) -> MoeConfig:
        """A rank's part of each expert, or with expert_rank its whole experts."""
        if expert_rank is None:
            return replace(self, intermediate_size=self.intermediate_size // size)
        return replace(self, expert_rank=expert_rank, expert_ranks=size, exchange=exchange)


@dataclass(frozen=True, slots=True)
class LatentConfig:
    """Multi-head latent attention, see `engine.mla.latent_attention`.

    q_lora_rank: None: queries are not compressed. mscale: its square is a factor on scores. rope_interleave: the
    checkpoint's rotary dimensions are pairs. form: what the pool keeps, and when it is expanded.
    """

    q_lora_rank: int | None
    kv_lora_rank: int
    nope_head_dim: int
    rope_head_dim: int
    v_head_dim: int
    mscale: float = 1.0
    rope_interleave: bool = True
    form: str = "absorbed"


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """Shape and constants of a decoder with grouped-query or latent attention, and gated MLPs or experts.

    num_kv_heads, head_dim: as the pool has them (`with_latent`). sliding_window: tokens that layers look back, but
    for `full_layers`; local_rope: that of such layers, if it is another one. is_causal: else tokens attend to later
    ones, too, and with a window to those nearer than it on both sides. query_scale: a factor on 1/sqrt(head_dim).
    unused_weights: beginnings of names that a checkpoint may have beyond the model. expert_slots: each layer's
    placement of experts, if they have any, see `engine.expert_balancing.placement`. linear_bits: of a weight of
    blocks, where they stay as a quantized checkpoint holds them; embedding and head have 16. Of a rank of a
    tensor-parallel model: heads, intermediate sizes and vocabulary are that rank's (`shard`).
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
        """Rotated dimensions of a head."""
        return self.head_dim if self.latent is None else self.latent.rope_head_dim

    @property
    def num_kv_planes(self) -> int:
        """2, K and V; of latents 1."""
        return 2 if self.latent is None or self.latent.form == "naive" else 1

    @property
    def windows(self) -> tuple[int, ...]:
        """Tokens that each layer looks back, 0: all; of a model whose layers all look back to the start, nothing."""
        if self.sliding_window is None:
            return ()
        return tuple(0 if layer in self.full_layers else self.sliding_window for layer in range(self.num_layers))

    @property
    def q_size(self) -> int:
        return self.num_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        return self.num_kv_heads * self.head_dim

    def has_experts(self, layer: int) -> bool:
        return self.moe is not None and layer not in self.moe.dense_layers

    def of_layer(self, layer: int) -> ModelConfig:
        """The config with this layer's placement of experts."""
        if self.moe is None or not self.expert_slots:
            return self
        return replace(self, moe=replace(self.moe, slots=self.expert_slots[layer]))

    def shard(self, size: int, expert_rank: int | None = None, expert_exchange: ExchangeKind = "sum") -> ModelConfig:
        """What each of `size` ranks holds, see `engine.layers.weights.Partition`. Raises ConfigError.

        expert_rank: this rank, if it is to have whole experts. expert_exchange: how the others get to them.

        Ranks are alike: where there are fewer KV heads than ranks, several have the same one, and a vocabulary that
        cannot be divided is padded.
        """

        if not self.can_be_divided(size):
            possible = ", ".join(str(count) for count in range(1, self.num_heads + 1) if self.can_be_divided(count))
            raise ConfigError(
                f"{size} ranks cannot divide {self.num_heads} query heads, {self.num_kv_heads} KV heads and "
                f"{self.intermediate_size} columns of MLPs: choose --tp of {possible}"
            )
        moe = self.moe
        if expert_rank is not None and (moe is None or (moe.num_experts % size and not self.expert_slots)):
            experts = "no experts" if moe is None else f"{moe.num_experts} experts a layer"
            raise ConfigError(f"--expert-parallel: {size} ranks cannot divide {experts}: leave it out")
        return replace(
            self,
            vocab_size=-(-self.vocab_size // size),
            num_heads=self.num_heads // size,
            num_kv_heads=max(self.num_kv_heads // size, 1),
            intermediate_size=self.intermediate_size // size,
            moe=moe and moe.shard(size, expert_rank, expert_exchange),
        )

    def can_be_divided(self, size: int) -> bool:
        """Whether `size` ranks can have equal parts of the model."""
        columns = [self.intermediate_size, *([self.moe.intermediate_size] if self.moe else [])]
        most, least = max(self.num_kv_heads, size), min(self.num_kv_heads, size)
        return most % least == 0 and not any(count % size for count in (self.num_heads, *columns))

    def context_length(self, max_model_len: int) -> int:
        """Longest sequence to serve: `max_model_len`, or with 0 what the model computes correctly.

        Raises ConfigError when `max_model_len` is beyond that.
        """
        limit = self.max_position_embeddings
        if max_model_len > limit:
            raise ConfigError(
                f"--max-model-len {max_model_len} exceeds the model's {limit} positions: choose at most {limit}"
            )
        return max_model_len or limit


def with_latent(config: ModelConfig, latent: LatentConfig) -> ModelConfig:
    """The config with latent attention, and with heads as the pool keeps them in that form. Raises ConfigError."""
    qk_dim = latent.nope_head_dim + latent.rope_head_dim
    if latent.rope_head_dim % 2:
        raise ConfigError(f"qk_rope_head_dim {latent.rope_head_dim} is odd, rotary embedding needs pairs")
    if latent.v_head_dim > qk_dim:
        raise ConfigError(f"values of {latent.v_head_dim} (v_head_dim) are wider than keys of {qk_dim}")
    if latent.form == "naive":
        return replace(config, latent=latent, num_kv_heads=config.num_heads, head_dim=qk_dim)
    return replace(config, latent=latent, num_kv_heads=1, head_dim=latent.kv_lora_rank + latent.rope_head_dim)


def check_config(config: ModelConfig) -> None:
    """Refuse shapes that do not fit together."""
    if config.num_heads % config.num_kv_heads:
        raise ConfigError(f"{config.num_heads} query heads cannot share {config.num_kv_heads} KV heads")
    rotated = config.rope.rotated(config.head_dim)
    if config.head_dim % 2 or rotated % 2 or not 0 < rotated <= config.head_dim:
        raise ConfigError(f"rotary embedding of {rotated} of {config.head_dim} numbers a head: it needs pairs")
