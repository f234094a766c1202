"""The model's embedding and output projection, whole even if ranks shard them, for a head that drafts for it.

Only rank 0 has the head. It reads residuals after the all-reduce, which are equal on all ranks.
"""

from __future__ import annotations

import torch
from torch import Tensor

from common.errors import ConfigError
from common.model_files import resolve_model
from engine.config import EngineConfig
from engine.cpu_gemms.gemms import dense_linear
from engine.layers.linear import Linear
from engine.loader.load import LoadedModel
from engine.loader.source import open_source


def check_ranks(flag: str, config: EngineConfig) -> None:
    """Raise ConfigError where rank 0 does not see all of a step's hidden states."""
    if config.pp > 1:
        raise ConfigError(f"{flag}: the head reads layers of the whole model; leave out --pp")
    if getattr(config, "expert_exchange", "sum") != "sum":  # this setting's wing may be absent
        raise ConfigError(f"{flag}: with --expert-exchange dispatch a rank has a part of the tokens; use sum")


def whole_vocabulary(config: EngineConfig, loaded: LoadedModel) -> tuple[Tensor, Linear]:
    """Return the embedding (vocab, hidden) and output projection; with several ranks, read from the files again."""
    model = loaded.config
    if loaded.shard.size == 1:
        return loaded.model.embedding, loaded.model.head
    source = open_source(resolve_model(config.model), config, loaded.dtype, loaded.device)
    shape = model.vocab_size, model.hidden_size
    with torch.inference_mode():
        embedding = source.weights.take("model.embed_tokens.weight", shape)
        head = embedding if model.tie_word_embeddings else source.weights.take("lm_head.weight", shape)
        return embedding, dense_linear(head, None)
