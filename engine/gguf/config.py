"""A model's config from GGUF metadata (`{arch}.block_count`, ...)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from common.errors import ConfigError, UnsupportedModelError
from engine.gguf.fields import family_fields
from engine.gguf.names import OUTPUT_WEIGHT
from engine.gguf.rope import rope_from_gguf, with_factors
from engine.gguf.weights import GgufFile
from engine.models.config import ModelConfig, check_config
from engine.models.registry import ModelFamily


def config_from_gguf(metadata: Mapping[str, Any], architecture: str, has_output_weight: bool) -> ModelConfig:
    """Translate the metadata. Raises UnsupportedModelError."""
    arch = str(metadata["general.architecture"])

    def get(key: str, default: Any = None) -> Any:
        value = metadata.get(f"{arch}.{key}", default)
        if value is None:
            raise ConfigError(f"the GGUF file lacks the metadata key {arch}.{key}")
        return value

    num_heads, hidden_size = int(get("attention.head_count")), int(get("embedding_length"))
    head_dim = int(get("attention.key_length", hidden_size // num_heads))
    rotated = int(get("rope.dimension_count", head_dim))
    if arch == "deepseek2":  # its family has its own sizes
        rotated = head_dim
    elif int(get("attention.value_length", head_dim)) != head_dim or (rotated != head_dim and arch != "phi3"):
        raise UnsupportedModelError("keys, values and rotary embedding of different widths are not supported")
    vocab = metadata.get(f"{arch}.vocab_size") or len(metadata.get("tokenizer.ggml.tokens", ()))
    eos = [metadata.get(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot")]
    config = ModelConfig(
        architecture=architecture,
        vocab_size=int(vocab),
        hidden_size=hidden_size,
        num_layers=int(get("block_count")) - int(get("nextn_predict_layers", 0)),
        num_heads=num_heads,
        num_kv_heads=int(get("attention.head_count_kv", num_heads)),
        head_dim=head_dim,
        intermediate_size=int(get("feed_forward_length")),
        rms_norm_eps=float(get("attention.layer_norm_rms_epsilon")),
        rope=replace(rope_from_gguf(metadata, arch), partial=rotated / head_dim),
        max_position_embeddings=int(get("context_length")),
        tie_word_embeddings=not has_output_weight,
        sliding_window=metadata.get(f"{arch}.attention.sliding_window") or None,
        is_causal=bool(metadata.get(f"{arch}.attention.causal", True)),
        eos_token_ids=tuple(dict.fromkeys(int(token) for token in eos if token is not None)),
    )
    check_config(config)
    return config


def adapted_config(file: GgufFile, family: ModelFamily) -> ModelConfig:
    """Return the family's config of a file. Raises ConfigError and UnsupportedModelError."""
    has_output_weight = OUTPUT_WEIGHT in file.tensors
    config = config_from_gguf(file.metadata, family.architecture, has_output_weight)
    rope = with_factors(config.rope, file, str(file.metadata["general.architecture"]))
    return family.adapt_config(
        replace(config, rope=rope), {**file.metadata, **family_fields(file.metadata, has_output_weight)}
    )
