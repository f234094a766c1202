"""How a model attends, layer by layer, found by a forward pass without storage: no weight is read.

A model is taken if each of its layers attends once, through transformers' interface, in a way that our paged
attention knows. What else may carry state from token to token is found with the weights (`isolation.py`).
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from common.errors import ConfigError, UnsupportedModelError
from engine.models.config import ModelConfig, RopeConfig
from engine.models.hf_config import architecture_of
from engine.transformers_models.seam import NAME, Layer, record

NUM_TOKENS = 3
KINDS = ("full_attention", "sliding_attention")
PADDING_CHECK = "warn_if_padding_and_no_attention_mask"
BATCH_ROPE = ("dynamic", "longrope")


def read_config(transformers: Any, directory: Path) -> Any:
    """transformers' config of a directory. Raises UnsupportedModelError."""
    try:
        return transformers.AutoConfig.from_pretrained(directory, local_files_only=True, trust_remote_code=False)
    except (ValueError, KeyError, TypeError, OSError) as error:  # what it raises for models that it does not know
        version = transformers.__version__
        raise UnsupportedModelError(f"transformers {version} cannot read its config: {error}") from error


def check_architecture(transformers: Any, config: Any, architecture: str) -> None:
    """Raise UnsupportedModelError for what is no decoder of text alone."""
    if getattr(config, "is_encoder_decoder", False):
        raise UnsupportedModelError("it is an encoder and a decoder; decoders alone are served")
    if set(getattr(config, "sub_configs", ())) - {"attn_config", "ffn_config"}:
        raise UnsupportedModelError("its config describes more than a text model (multimodal)")
    known = transformers.MODEL_FOR_CAUSAL_LM_MAPPING
    if type(config) not in known or known[type(config)].__name__ != architecture:
        raise UnsupportedModelError("transformers has no causal language model of that name")
    kinds = set(getattr(config, "layer_types", None) or ()) - set(KINDS)
    if kinds or getattr(config, "attention_chunk_size", None):
        raise UnsupportedModelError(f"it has layers of {', '.join(sorted(kinds)) or 'chunked_attention'}")
    rope = getattr(config, "rope_parameters", None) or {}
    types = {each.get("rope_type") for each in (rope, *rope.values()) if isinstance(each, dict)}
    if types & set(BATCH_ROPE):
        raise UnsupportedModelError(
            "its rotary embedding (dynamic or longrope) follows the longest sequence of a batch in transformers"
        )


def find_layers(transformers: Any, config: Any) -> tuple[Layer, ...]:
    """All layers in their order. Raises UnsupportedModelError with the reason."""
    calls: list[Layer] = []
    try:
        with torch.device("meta"):
            model = build(transformers, config, experts_implementation="batched_mm")  # no loop over values
            record(model, calls)
            ids = torch.zeros(1, NUM_TOKENS, dtype=torch.long)
            with torch.no_grad():
                model(input_ids=ids, position_ids=torch.arange(NUM_TOKENS)[None], use_cache=False)
    except UnsupportedModelError:
        raise
    except Exception as error:  # any, of any model's code
        if isinstance(error, KeyError) and error.args == (NAME,):
            raise UnsupportedModelError(
                "its attention does not go through transformers' attention interface"
            ) from error
        raise UnsupportedModelError(f"its forward pass needs more than token ids and positions: {error}") from error
    check_layers(calls, config)
    return tuple(calls)


def build(transformers: Any, config: Any, **options: Any) -> Any:
    """A model of random weights that attends through `NAME`."""
    model = transformers.AutoModelForCausalLM.from_config(copy.deepcopy(config), attn_implementation=NAME, **options)
    return without_padding(model.eval())


def without_padding(model: Any) -> Any:
    """The model, which no longer looks for padding among token ids to warn of: there is none."""
    for module in model.modules():
        if hasattr(module, PADDING_CHECK):
            module.__dict__[PADDING_CHECK] = lambda *_: None
    return model


def check_layers(layers: Sequence[Layer], config: Any) -> None:
    """Raise UnsupportedModelError if layers do not attend once each and alike."""
    if len({layer.name for layer in layers}) != len(layers):
        raise UnsupportedModelError("a layer attends more than once to one token")
    if len(layers) > config.num_hidden_layers:
        raise UnsupportedModelError(f"it attends {len(layers)} times in {config.num_hidden_layers} layers")
    if len(layers) < config.num_hidden_layers:
        raise UnsupportedModelError(
            f"{len(layers)} of its {config.num_hidden_layers} layers attend through transformers' attention "
            "interface; others keep a state or have attention of their own"
        )
    shapes = {(layer.num_heads, layer.num_kv_heads, layer.k_dim, layer.v_dim) for layer in layers}
    if len(shapes) > 1:
        raise UnsupportedModelError("its layers have heads of different numbers or sizes")
    windows = [layer.window for layer in layers]
    if len({window for window in windows if window}) > 1:
        raise UnsupportedModelError("its layers have windows of different lengths")
    kinds = getattr(config, "layer_types", None)
    wanted = [kind == "sliding_attention" for kind in kinds] if kinds else None
    is_silent = not any(windows) and bool(getattr(config, "sliding_window", None))
    if (is_silent and wanted is None) or (wanted is not None and wanted != [window > 0 for window in windows]):
        raise UnsupportedModelError("its windows are known to masks alone, not to its attention")


def model_config(raw: dict[str, Any], config: Any, layers: Sequence[Layer], max_model_len: int) -> ModelConfig:
    """What the engine needs to know. raw: config.json. Raises ConfigError."""
    num_positions = getattr(config, "max_position_embeddings", None) or max_model_len
    if not num_positions:
        raise ConfigError("config.json names no longest sequence (max_position_embeddings): give --max-model-len")
    first, window = layers[0], max(layer.window for layer in layers)
    eos = raw.get("eos_token_id")
    return ModelConfig(
        architecture=architecture_of(raw),
        vocab_size=config.vocab_size,
        hidden_size=config.hidden_size,
        num_layers=len(layers),
        num_heads=first.num_heads,
        num_kv_heads=first.num_kv_heads,
        head_dim=max(first.k_dim, first.v_dim),
        intermediate_size=0,  # of ranks and kernels, which there are none of
        rms_norm_eps=0.0,
        rope=RopeConfig(),
        max_position_embeddings=num_positions,
        sliding_window=window or None,
        full_layers=tuple(index for index, layer in enumerate(layers) if not layer.window) if window else (),
        eos_token_ids=tuple(eos if isinstance(eos, list) else [] if eos is None else [eos]),
    )
