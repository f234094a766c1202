"""Opens an EAGLE-3 head next to the model that it was trained for."""

from __future__ import annotations

import logging

import torch

from common.errors import ConfigError
from common.model_files import resolve_model
from engine.config import EngineConfig
from engine.loader.load import LoadedModel
from engine.speculation.draft_length import DraftLengths
from engine.speculation.eagle.checkpoint import read_head
from engine.speculation.eagle.head import EagleHead
from engine.speculation.heads.proposer import FromHead
from engine.speculation.heads.whole import check_ranks, whole_vocabulary

logger = logging.getLogger(__name__)


def open_eagle_head(
    name: str, num_tokens: int, config: EngineConfig, loaded: LoadedModel, lengths: DraftLengths
) -> FromHead:
    """Open a head. name: its folder or hub id. Raises ConfigError if it does not fit the model."""
    flag = f"--speculative eagle:{name}"
    check_ranks(flag, config)
    if config.is_simulated:
        raise ConfigError(f"{flag}: --simulated-steps compute nothing that the head could read")
    if not loaded.config.is_causal:
        raise ConfigError(f"{flag}: {config.model} generates no text")
    head = read_fitting_head(name, config, loaded)
    logger.info("drafts by the EAGLE-3 head %s, which reads layers %s", name, head.shape.layers)
    return FromHead(head, lengths, num_tokens, loaded.config.vocab_size)


def read_fitting_head(name: str, config: EngineConfig, loaded: LoadedModel) -> EagleHead:
    """Read the head of a folder or hub id onto the model's device. Raises ConfigError if it does not fit."""
    flag, files = f"--speculative eagle:{name}", resolve_model(name)
    if files.kind != "directory":
        raise ConfigError(f"{flag}: name a folder with config.json and the head's weights, or a hub id")
    with torch.inference_mode():
        try:
            return read_head(files.path, loaded.config, *whole_vocabulary(config, loaded))
        except ConfigError as error:
            raise ConfigError(f"{flag}: {error}") from error
