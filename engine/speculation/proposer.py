"""Chooses the proposer of drafts by the settings.

A proposer cannot change a request's output, only its speed: a draft is accepted if it equals the token sampled at its
position, which is the same as without drafts. With rejection sampling (`rejection.py`), the distribution of outputs
stays the same.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from common.errors import ConfigError
from engine.config import EngineConfig
from engine.runner import Proposer
from engine.speculation.draft_length import DraftLengths
from engine.speculation.drafts import Speculation
from engine.speculation.from_model import FromModel
from engine.speculation.from_tokens import FromTokens
from engine.speculation.lookup import ngram, suffix
from engine.speculation.overlap import MeasuredOverlap, Overlap
from engine.speculation.rejection import RejectionSampler
from engine.speculation.settings import REJECTION_IN_ONE_PROCESS, Method, SpeculationSettings

if TYPE_CHECKING:
    from engine.config import GpuConfig
    from engine.loader.load import LoadedModel
    from engine.speculation.on_gpu.open_draft_model import OnGpu


CPU_TILE = 8  # rows that GEMMs of quantized weights compute together, at nearly the cost of one


def proposer_on_gpu(config: EngineConfig, loaded: LoadedModel, gpu: GpuConfig) -> OnGpu | None:
    """Load a draft model or head onto the model's GPU, if the settings ask for one. Raises ConfigError."""
    settings = config.of(SpeculationSettings).resolved()
    if loaded.device.type != "cuda" or not settings.method.has_weights:
        return None
    from engine.speculation.on_gpu import open_draft_model, open_head  # these need triton

    if settings.method is Method.EAGLE:
        return open_head.load_eagle_head(settings.eagle_head, config, loaded)
    if settings.method is Method.MTP:
        return open_head.load_module(config, loaded)
    return open_draft_model.load_on_gpu(settings.draft_model, config, loaded, gpu)


def open_speculation(
    config: EngineConfig, runner: Any, loaded: LoadedModel, on_gpu: OnGpu | None = None, num_blocks: int = 0
) -> Speculation | None:  # fmt: skip
    """Let the runner propose drafts, if the settings ask for them. On a GPU only steps with a decode graph have
    drafts.

    on_gpu: from `proposer_on_gpu`. num_blocks: of the model's KV pool. Raises ConfigError for a draft model or head
    that does not fit.
    """
    settings = config.of(SpeculationSettings).resolved()
    if not settings.num_speculative_tokens:
        return None
    lengths = DraftLengths(settings.adaptive_drafts, CPU_TILE if loaded.device.type == "cpu" else 0)
    num_tokens = settings.num_speculative_tokens
    by_rejection = settings.speculative_sampling == "rejection"
    if by_rejection and (on_gpu is not None or config.num_ranks > 1):
        raise ConfigError(REJECTION_IN_ONE_PROCESS)  # an auto-detected GPU, or vLLM's JSON
    proposer: Proposer
    if on_gpu is not None:
        overlap = MeasuredOverlap(lengths) if _can_overlap(settings, config, runner) else None
        runner.propose_with(on_gpu.open(num_blocks, num_tokens, lengths, overlap))
        return Speculation(lengths, config.max_num_seqs, overlap)
    if settings.method is Method.DRAFT:
        from engine.speculation.open_draft_model import open_draft_model

        proposer = open_draft_model(settings.draft_model, num_tokens, config, loaded.config.vocab_size, lengths)
    elif settings.method is Method.EAGLE:
        from engine.speculation.eagle.opening import open_eagle_head

        proposer = open_eagle_head(settings.eagle_head, num_tokens, config, loaded, lengths)
    elif settings.method is Method.MTP:
        from engine.speculation.mtp.opening import open_module

        proposer = open_module(num_tokens, config, loaded, lengths)
    else:
        proposer = from_tokens(settings)
    if by_rejection and isinstance(proposer, FromModel):
        proposer.keep_distributions(loaded.config.vocab_size)
        runner.sample_with(RejectionSampler())
    runner.propose_with(proposer)
    can_overlap = _can_overlap(settings, config, runner)
    max_decode_tokens = config.max_num_seqs if loaded.device.type == "cuda" else None
    return Speculation(lengths, max_decode_tokens, Overlap(lengths) if can_overlap else None)


def _can_overlap(settings: SpeculationSettings, config: EngineConfig, runner: Any) -> bool:
    return settings.adaptive_drafts and runner.max_steps_in_flight > 1 and config.pp == 1


def from_tokens(settings: SpeculationSettings) -> FromTokens:
    """Return the proposer without a model that the settings name."""
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
