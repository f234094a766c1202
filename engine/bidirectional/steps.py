"""Settings of an engine whose steps compute whole prompts, since each token depends on all others of its prompt.

So nothing is cached, prompts are not split into chunks, and a step's tokens limit the length of a prompt.
"""

from __future__ import annotations

from dataclasses import replace

from common.errors import ConfigError, InvalidRequestError, UnsupportedModelError
from engine.config import EngineConfig
from engine.eight_bit_kv.settings import KvDtypeSettings
from engine.models.config import ModelConfig
from engine.request import Request

MAX_STEP_TOKENS = 8192  # limit up to which a long context raises a step's tokens; more only on request


def for_whole_prompts(config: EngineConfig, model: ModelConfig, asked_tokens: int) -> EngineConfig:
    """Return the settings of such an engine. Raises ConfigError, UnsupportedModelError.

    config: resolved for the device. asked_tokens: --max-num-batched-tokens as given; 0: not given.
    """
    if model.latent is not None:
        raise UnsupportedModelError("latent attention to later tokens (is_causal: false) is not supported")
    kv_dtype = config.of(KvDtypeSettings).kv_cache_dtype
    if kv_dtype != "auto":
        raise ConfigError(f"--kv-cache-dtype {kv_dtype}: {model.architecture} caches nothing; leave it out")
    context = model.context_length(config.max_model_len)
    num_tokens = config.max_num_batched_tokens
    if not asked_tokens:
        num_tokens = max(num_tokens, min(context - 1, MAX_STEP_TOKENS))
    longest = num_tokens + 1  # with the token that is sampled along with a vector
    if config.max_model_len > longest:
        raise ConfigError(
            f"--max-model-len {config.max_model_len}: {model.architecture} attends to later tokens, so that a prompt "
            f"is computed in one step, of {num_tokens} tokens here: choose at most {longest}, or raise "
            f"--max-num-batched-tokens to {config.max_model_len - 1}"
        )
    max_model_len = longest if context > longest else config.max_model_len
    return replace(config, prefix_cache=False, max_num_batched_tokens=num_tokens, max_model_len=max_model_len)


def check_pooled(request: Request) -> None:
    """See `engine.wings.Prepare`."""
    if not request.params.pooling:
        raise InvalidRequestError("this model attends to later tokens: it gives vectors, and no text", "model")
