"""Opens a draft model next to the model that it drafts for."""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import Any

import torch

from common.errors import ConfigError, UnsupportedModelError
from common.model_files import ModelFiles, resolve_model
from common.text.load import load_tokenizer
from common.wings import has_wing
from engine.config import EngineConfig
from engine.kv.memory import allocate_pool, context_in_pool, make_kv_manager, pool_geometry
from engine.loader.load import LoadedModel, load_model
from engine.models.model import Model
from engine.speculation.draft_length import DraftLengths
from engine.speculation.draft_model import DraftRunner, FromCpuDraftModel, FromDraftModel, VocabSizes

logger = logging.getLogger(__name__)


def open_draft_model(
    name: str, num_tokens: int, config: EngineConfig, vocab_size: int, lengths: DraftLengths
) -> FromDraftModel:
    """Load the draft model on the CPU, with a KV pool of as many blocks as its target's. Raises ConfigError.

    config: the target's. vocab_size: of the target.
    """
    device = torch.device("cpu")
    files, loaded, config, sizes = load_draft_model(name, config, vocab_size, device)
    geometry = pool_geometry(loaded.config, config, loaded.fingerprint, loaded.dtype)
    runner = DraftRunner(loaded, allocate_pool(geometry, device), None, config)
    runner.warmup()
    logger.info("drafts by %s, %d KV blocks", files.name, geometry.num_blocks)
    return FromCpuDraftModel(
        runner,
        make_kv_manager(geometry, config),
        lengths,
        num_tokens,
        config.max_num_batched_tokens,
        context_in_pool(loaded.config.context_length(0), geometry, config),
        sizes,
    )


def load_draft_model(
    name: str, config: EngineConfig, vocab_size: int, device: torch.device
) -> tuple[ModelFiles, LoadedModel, EngineConfig, VocabSizes]:
    """Load the weights, see `open_draft_model`. Also returns the draft model's config."""
    files, target = resolve_model(name), config.model
    plain_kv: dict[str, Any] = {"kv_cache_dtype": "auto"} if has_wing("engine.eight_bit_kv") else {}
    config = replace(config, model=name, tp=1, pp=1, stage_address="", max_model_len=0, **plain_kv)
    loaded = load_model(files, config, device)
    if type(loaded.model) is not Model:
        raise ConfigError(
            f"--speculative draft:{name}: transformers' code computes no draft models: choose one that this project "
            "has code for, and leave out --model-impl transformers"
        )
    sizes = VocabSizes(vocab_size, loaded.config.vocab_size)
    if not have_same_tokens(resolve_model(target), files, sizes):
        raise ConfigError(f"--speculative draft:{name}: choose a model with the tokenizer of {target}")
    if not loaded.config.is_causal:
        raise ConfigError(f"--speculative draft:{name}: the model generates no text")
    return files, loaded, config, sizes


def have_same_tokens(target: ModelFiles, draft: ModelFiles, sizes: VocabSizes) -> bool:
    """Whether token ids mean the same in both models; without tokenizers the vocabulary sizes decide."""
    ours, theirs = _vocabulary(target), _vocabulary(draft)
    if not ours or not theirs:
        return sizes.of_target == sizes.of_draft
    common = ours.keys() & theirs.keys()
    return bool(common) and all(ours[text] == theirs[text] for text in common)


def _vocabulary(files: ModelFiles) -> dict[str, int]:
    try:
        return load_tokenizer(files).vocabulary()
    except UnsupportedModelError:  # the model is served by token ids
        return {}
