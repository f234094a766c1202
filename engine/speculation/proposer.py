"""Chooses what proposes drafts, by the settings.

A proposer cannot change a request's output, only its speed: a draft is accepted when it equals the token that is
sampled at its position, which is the one that the request would get without drafts.
"""

from __future__ import annotations

from typing import Any

from common.errors import ConfigError
from engine.config import EngineConfig
from engine.runner import Proposer
from engine.speculation import ngram, suffix
from engine.speculation.draft_length import DraftLengths
from engine.speculation.drafts import Speculation
from engine.speculation.from_tokens import FromTokens
from engine.speculation.settings import Method, SpeculationSettings


def open_speculation(config: EngineConfig, runner: Any, vocab_size: int, on_gpu: bool) -> Speculation | None:
    """Let the runner propose drafts, if they are wanted. On a GPU they are in steps that have a decode graph.

    Raises ConfigError for a draft model that does not fit.
    """
    settings = config.of(SpeculationSettings).resolved()
    if not settings.num_speculative_tokens:
        return None
    lengths = DraftLengths(settings.adaptive_drafts)
    if settings.method is Method.DRAFT:
        if on_gpu:
            raise ConfigError(
                f"--speculative {settings.speculative}: draft models run on CPUs; choose ngram or suffix"
            )
        from engine.speculation.open_draft_model import open_draft_model

        num_tokens = settings.num_speculative_tokens
        proposer: Proposer = open_draft_model(settings.draft_model, num_tokens, config, vocab_size, lengths)
    else:
        proposer = from_tokens(settings)
    runner.propose_with(proposer)
    return Speculation(lengths, config.max_num_seqs if on_gpu else None)


def from_tokens(settings: SpeculationSettings) -> FromTokens:
    """The proposer without a model that the settings name."""
    num_tokens = settings.num_speculative_tokens
    if settings.method is Method.SUFFIX:
        answers = suffix.AnswersBySalt(settings.suffix_tokens)
        return FromTokens(
            lambda request: suffix.SuffixDrafter(answers.of(request.cache_salt), request),
            num_tokens,
            suffix.NUM_KINDS,
        )
    return FromTokens(
        lambda _request: ngram.NgramDrafter(settings.ngram_max, settings.ngram_min), num_tokens, ngram.NUM_KINDS
    )
