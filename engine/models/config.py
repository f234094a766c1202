"""Config of a decoder model, from a Hugging Face `config.json` or from GGUF metadata.

Both spellings of transformers' files are read (`rope_theta` or `rope_parameters`, `torch_dtype` or `dtype`). This
module knows no family: what one family spells differently is corrected by its entry in `engine/models/registry.py`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from common.errors import ConfigError, UnsupportedModelError
from engine.models.rope import RopeConfig, rope_from_gguf, rope_from_hf

ScoreKind = Literal["softmax", "sigmoid"]
ExchangeKind = Literal["sum", "dispatch"]
PLAIN_BITS = 16  # of a weight that is not quantized


@dataclass(frozen=True, slots=True)
class MoeConfig:
    """Experts of a layer. intermediate_size: of one. normalizes_weights: the chosen experts' shares add up to one.
    dense_layers: those with a plain MLP instead. num_shared_experts: those that every token passes through, beside
    the ones it chooses. expert_rank, expert_ranks: experts are divided among ranks, and this one has its part of
    them, whole; of shared experts it has a part of each. exchange: how ranks get to each other's experts; with
    `dispatch` rows are divided among ranks, see `engine.layers.divided_rows`, and all have the shared experts whole.
    slots: the expert in each slot of all ranks, see `engine.expert_placement`; empty: each once, in order.
    The rest is the rule by which a token chooses, see `engine.layers.routing`.
    """

    num_experts: int
    num_experts_per_token: int
    intermediate_size: int
    normalizes_weights: bool = True
    dense_layers: tuple[int, ...] = ()
    num_shared_experts: int = 0
    score: ScoreKind = "softmax"
    has_choice_bias: bool = False
    num_groups: int = 1
    num_chosen_groups: int = 1
    group_top: int = 1
    weight_factor: float = 1.0
    float32_router: bool = False
    swiglu_alpha: float = 1.0  # these two of experts with a clamped activation, see `engine.layers.stacked_moe`
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
    """Multi-head latent attention, see `engine.layers.latent_attention`.

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
    for `full_layers`; local_rope: that of such layers, if it is another one. query_scale: a factor on
    1/sqrt(head_dim). unused_weights: beginnings of names that a checkpoint may have beyond the model. expert_slots:
    each layer's placement of experts, if they have any, see `engine.expert_placement`. linear_bits: of a weight of
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
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()
    unused_weights: tuple[str, ...] = ()
    expert_slots: tuple[tuple[int, ...], ...] = ()

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


def read_hf_config(directory: Path) -> dict[str, Any]:
    """`config.json`, with the end-of-sequence ids of `generation_config.json` when that file names any."""
    raw = _read_json(directory / "config.json")
    generation = directory / "generation_config.json"
    if generation.is_file():
        eos = _read_json(generation).get("eos_token_id")
        if eos is not None:
            raw["eos_token_id"] = eos
    return raw


def config_from_hf(raw: Mapping[str, Any]) -> ModelConfig:
    """Translate a Hugging Face config. Raises UnsupportedModelError or ConfigError with the field's name."""
    activation = raw.get("hidden_act", "silu")
    if activation not in ("silu", "swish"):
        raise UnsupportedModelError(f"activation {activation!r} is not supported (known: silu)")
    num_heads = positive(raw, "num_attention_heads")
    hidden_size = positive(raw, "hidden_size")
    eos = raw.get("eos_token_id")
    eos_ids = eos if isinstance(eos, list) else [] if eos is None else [eos]
    max_position = positive(raw, "max_position_embeddings")
    config = ModelConfig(
        architecture=architecture_of(raw),
        vocab_size=positive(raw, "vocab_size"),
        hidden_size=hidden_size,
        num_layers=positive(raw, "num_hidden_layers"),
        num_heads=num_heads,
        num_kv_heads=int(raw.get("num_key_value_heads") or num_heads),
        head_dim=int(raw.get("head_dim") or hidden_size // num_heads),
        intermediate_size=positive(raw, "intermediate_size"),
        rms_norm_eps=float(raw.get("rms_norm_eps", 1e-6)),
        rope=rope_from_hf(raw, max_position),
        max_position_embeddings=max_position,
        tie_word_embeddings=bool(raw.get("tie_word_embeddings", False)),
        sliding_window=_sliding_window(raw),
        full_layers=_full_layers(raw),
        bos_token_id=raw.get("bos_token_id"),
        eos_token_ids=tuple(int(token) for token in eos_ids),
    )
    check_config(config)
    return config


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


def moe_from_hf(raw: Mapping[str, Any], intermediate_size: str) -> MoeConfig:
    """The fields that all families with experts have. intermediate_size: what the family calls that of an expert."""
    names = ("num_experts", "n_routed_experts", "num_local_experts")  # as files and newer transformers write it
    count = next((name for name in names if name in raw), names[0])
    moe = MoeConfig(positive(raw, count), positive(raw, "num_experts_per_tok"), positive(raw, intermediate_size))
    if moe.num_experts_per_token > moe.num_experts:
        raise ConfigError(f"config.json: {moe.num_experts_per_token} experts a token of {moe.num_experts}")
    return moe


def config_from_gguf(metadata: Mapping[str, Any], architecture: str, has_output_weight: bool) -> ModelConfig:
    """Translate GGUF metadata (`{arch}.block_count`, ...). Raises UnsupportedModelError."""
    arch = str(metadata["general.architecture"])

    def get(key: str, default: Any = None) -> Any:
        value = metadata.get(f"{arch}.{key}", default)
        if value is None:
            raise ConfigError(f"the GGUF file lacks the metadata key {arch}.{key}")
        return value

    num_heads, hidden_size = int(get("attention.head_count")), int(get("embedding_length"))
    head_dim = int(get("attention.key_length", hidden_size // num_heads))
    if (
        int(get("attention.value_length", head_dim)) != head_dim
        or int(get("rope.dimension_count", head_dim)) != head_dim
    ):
        raise UnsupportedModelError("keys, values and rotary embedding of different widths are not supported")
    vocab = metadata.get(f"{arch}.vocab_size") or len(metadata.get("tokenizer.ggml.tokens", ()))
    eos = [metadata.get(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot")]
    config = ModelConfig(
        architecture=architecture,
        vocab_size=int(vocab),
        hidden_size=hidden_size,
        num_layers=int(get("block_count")),
        num_heads=num_heads,
        num_kv_heads=int(get("attention.head_count_kv", num_heads)),
        head_dim=head_dim,
        intermediate_size=int(get("feed_forward_length")),
        rms_norm_eps=float(get("attention.layer_norm_rms_epsilon")),
        rope=rope_from_gguf(metadata, arch),
        max_position_embeddings=int(get("context_length")),
        tie_word_embeddings=not has_output_weight,
        sliding_window=metadata.get(f"{arch}.attention.sliding_window") or None,
        bos_token_id=metadata.get("tokenizer.ggml.bos_token_id"),
        eos_token_ids=tuple(dict.fromkeys(int(token) for token in eos if token is not None)),
    )
    check_config(config)
    return config


def architecture_of(raw: Mapping[str, Any]) -> str:
    """The class name that `architectures` gives. Raises UnsupportedModelError without one."""
    names = raw.get("architectures") or []
    if not names:
        raise UnsupportedModelError("config.json names no architecture (field 'architectures')")
    return str(names[0])


def check_config(config: ModelConfig) -> None:
    """Refuse shapes that do not fit together."""
    if config.num_heads % config.num_kv_heads:
        raise ConfigError(f"{config.num_heads} query heads cannot share {config.num_kv_heads} KV heads")
    if config.head_dim % 2:
        raise ConfigError(f"head_dim {config.head_dim} is odd, rotary embedding needs pairs")


def _sliding_window(raw: Mapping[str, Any]) -> int | None:
    """The window, when any layer uses one."""
    window = raw.get("sliding_window")
    layer_types = raw.get("layer_types")
    if layer_types is not None and "sliding_attention" not in layer_types:
        return None
    if window is None or not raw.get("use_sliding_window", True):
        return None
    return int(window)


def _full_layers(raw: Mapping[str, Any]) -> tuple[int, ...]:
    """Layers without a window in a model that has one."""
    kinds = raw.get("layer_types") or () if _sliding_window(raw) is not None else ()
    unknown = set(kinds) - {"full_attention", "sliding_attention"}
    if unknown:
        raise UnsupportedModelError(f"layer_types of {', '.join(sorted(map(str, unknown)))} are not supported")
    return tuple(layer for layer, kind in enumerate(kinds) if kind == "full_attention")


def _read_json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path.name} cannot be read: {type(error).__name__}") from error
    if not isinstance(value, dict):
        raise ConfigError(f"{path.name} does not hold a JSON object")
    return value


def positive(raw: Mapping[str, Any], key: str) -> int:
    """The field. Raises ConfigError with its name."""
    value = raw.get(key)
    if not isinstance(value, int) or value <= 0:
        raise ConfigError(f"config.json: {key} must be a positive integer, not {value!r}")
    return value
