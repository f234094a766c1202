"""Loads a model from files and settings, and computes its fingerprint."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import logging
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch

from common.errors import ConfigError, UnsupportedModelError
from common.model_files import ModelFiles, sampled_digest
from common.text.load import load_tokenizer
from common.text.tokenizer import Tokenizer
from common.wings import call_wing, require_wing
from engine.config import EngineConfig, Stage
from engine.kv.memory import DTYPE_NAMES, TORCH_DTYPES
from engine.layers.block import Block
from engine.loader.checkpoint import ModelWeights
from engine.loader.source import Source, check_settings, open_source
from engine.models.config import PLAIN_BITS, ModelConfig
from engine.models.model import Model
from engine.wings import Constraints, OnProgress, no_progress
from kvstore.layout import WHOLE, Shard

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model ready to run, or a rank's part of it. `model.config` has the part's shapes, `config` the whole model's.

    `fingerprint` is equal if and only if weights, config, dtype, quantization and KV dtype are; ranks share it.
    """

    model: Model
    config: ModelConfig
    fingerprint: str
    dtype: torch.dtype
    quant_mode: str
    device: torch.device
    tokenizer: Callable[[], Tokenizer]  # reads it once. Raises UnsupportedModelError if there is none
    shard: Shard = WHOLE
    constraints: Constraints | None = None  # on output, over the tokenizer's tokens
    vector_modules: Any = None  # see `engine.pooling.modules`; None: this installation gives no vectors


def resolve_device(engine_config: EngineConfig) -> torch.device:
    """Return the device; `auto` is a GPU if there is one. Raises ConfigError if a GPU is asked for and missing."""
    has_gpu = torch.cuda.is_available()
    if engine_config.device == "cuda" and not has_gpu:
        raise ConfigError("--device cuda: no CUDA device is visible; use --device cpu")
    if engine_config.device == "cpu" or engine_config.is_simulated or not has_gpu:
        return torch.device("cpu")
    return torch.device("cuda", torch.cuda.current_device())


def resolve_dtype(files: ModelFiles, engine_config: EngineConfig) -> torch.dtype:
    """Return the dtype; `auto` is bfloat16, but float32 for the dry-run model."""
    if engine_config.dtype != "auto":
        return TORCH_DTYPES[engine_config.dtype]
    return torch.float32 if files.kind == "dry-run" else torch.bfloat16


def load_model(
    files: ModelFiles,
    engine_config: EngineConfig,
    device: torch.device | None = None,
    shard: Shard = WHOLE,
    on_progress: OnProgress = no_progress,
    stage: Stage | None = None,
) -> LoadedModel:
    """Read or make the weights of `files`. Raises ConfigError and UnsupportedModelError, which say what to do.

    shard, stage: the part of the model to load.
    """
    started = time.perf_counter()
    device = device or resolve_device(engine_config)
    dtype = resolve_dtype(files, engine_config)
    with torch.inference_mode():
        source = open_source(files, engine_config, dtype, device)
        if stage is not None:
            shard = call_wing("engine.pipeline_parallel.staged:shard_of_stage", source.config, shard, stage)
        model, quant_mode, more_identity = _build(source, engine_config, shard, dtype, device, on_progress)
    identity = {
        "config": _as_cached(source.config),
        "dtype": DTYPE_NAMES[dtype],
        "quant_mode": quant_mode,
        **more_identity,
        **source.identity,
        **(call_wing("engine.eight_bit_kv.scales:identity_of", engine_config) or {}),
    }
    name = fingerprint(identity, source.files)
    logger.info(
        "loaded %s (%s, %s) in %.1f s", files.name, DTYPE_NAMES[dtype], quant_mode, time.perf_counter() - started
    )
    tokenizer = cache(partial(load_tokenizer, files))
    return LoadedModel(
        model, source.config, name, dtype, quant_mode, device, tokenizer, shard,
        call_wing("engine.grammar.constraints:constraints_over", tokenizer, source.config.vocab_size),
        call_wing("engine.pooling.modules:modules_of", files, source.config.hidden_size, device),
    )  # fmt: skip


def read_config(files: ModelFiles, engine_config: EngineConfig) -> ModelConfig:
    """Read the model's config, but no weights. Raises ConfigError and UnsupportedModelError."""
    return open_source(files, engine_config, resolve_dtype(files, engine_config), torch.device("cpu")).config


def check_model(files: ModelFiles, engine_config: EngineConfig) -> ModelConfig:
    """Return the model's config if it fits the settings; reads no weight. Raises ConfigError, UnsupportedModelError.

    Lets callers fail before they start processes or read weights, also if the model cannot be divided among ranks.
    """
    if engine_config.num_ranks > 1:
        require_wing("engine.tensor_parallel", "--tp" if engine_config.tp > 1 else "--pp")
    config = read_config(files, engine_config)
    check_settings(config, engine_config)
    config.context_length(engine_config.max_model_len)
    call_wing("engine.tensor_parallel.rank_config:check_division", config, engine_config)
    return config


def check_kernels(config: ModelConfig, device: torch.device) -> None:
    """Raise UnsupportedModelError if the device has no kernels for the model."""
    if device.type != "cuda":
        return
    if config.latent is not None:
        config.latent.check_kernels()
    elif config.head_dim & (config.head_dim - 1):
        raise UnsupportedModelError(
            f"heads of {config.head_dim} numbers, which is no power of two, have no GPU kernels: use --device cpu"
        )


def _as_cached(config: ModelConfig) -> ModelConfig:
    """Return the config without what KV does not depend on."""
    latent = None if config.latent is None else config.latent.as_cached()
    return replace(config, linear_bits=PLAIN_BITS, latent=latent)


def _build(
    source: Source,
    engine_config: EngineConfig,
    shard: Shard,
    dtype: torch.dtype,
    device: torch.device,
    on_progress: OnProgress,
) -> tuple[Model, str, dict[str, str]]:
    """Build the model or a part of it. Returns it, its quant mode, and further entries of the fingerprint.

    Raises ConfigError.
    """
    conversion = source.conversion(engine_config, shard, dtype, device)
    check_kernels(source.config, device)
    skeleton, needed = source.checked_skeleton()
    if conversion is not None or shard != WHOLE:
        from engine.loader.partial import build_part

        return build_part(source, skeleton, conversion, engine_config, shard, dtype, device, on_progress)

    def finish(block: Block) -> None:
        call_wing("engine.eight_bit_kv.scales:fold_if_asked", engine_config, block.inner)

    model = source.family.build(source.config, ModelWeights(source.weights, needed, on_progress), finish)
    call_wing("engine.cpu_gemms.gemms:give_float32_logits", model)
    return model, "none", {}


def fingerprint(parts: dict[str, Any], files: Iterable[Path]) -> str:
    """Name weights and their form in memory: equal on two hosts with the same files, different otherwise.

    SHA-256 over `parts` (JSON values and dataclasses) and a digest of each file; names of folders do not count. The
    digest covers a file's header (names, shapes, types, offsets), its size and spread samples, not all weights: it
    prevents mixing models by mistake, not forged files.
    """
    digest = hashlib.sha256()
    digest.update(json.dumps(parts, sort_keys=True, default=dataclasses.asdict).encode())
    for path in files:
        digest.update(f"|{path.name}|".encode())
        digest.update(sampled_digest(path))
    return digest.hexdigest()
