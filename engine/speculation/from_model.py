"""Common base of proposers with their own model: drafting takes time, which has to pay, too."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace

from torch import Tensor

from common.step_times import StepTimes
from engine.request import Drafts, SamplingParams, TokenId
from engine.runner import Proposer
from engine.speculation.acceptance import Acceptance, DraftRecord
from engine.speculation.draft_length import DraftLengths
from engine.speculation.rejection import DraftSampler, DrawnDrafts

NUM_KINDS = 10  # a draft's kind is the probability that its model gives it, in tenths
MARGIN = 1.15  # estimates are inexact, and drafting in vain costs a lot
STEPS_BETWEEN_TRIALS = 1000  # while no draft can pay
FIRST_PAUSE, LONGEST_PAUSE = 8, 256  # steps until a request whose drafts did not pay gets drafts again


@dataclass(slots=True, kw_only=True)
class Drafting(DrawnDrafts):
    """A request's drafts, and how its earlier ones fared."""

    record: DraftRecord = field(default_factory=DraftRecord)
    drafts: Drafts = field(default_factory=lambda: Drafts([], []))
    probability: float = 1.0  # that all drafts so far are accepted
    pause: int = FIRST_PAUSE
    num_paused: int = 0

    def begin(self) -> None:
        """Forget the drafts of the previous step."""
        self.record.drafts, self.record.kinds, self.distributions = [], [], []

    def taken(self) -> Drafts:
        """Return the drafts and hand them over to the runner."""
        drafts, self.drafts = self.drafts, Drafts([], [])
        return drafts


class FromModel(Proposer):
    """Proposes drafts of a model whose passes take time."""

    def __init__(self, lengths: DraftLengths) -> None:
        self._lengths = lengths
        self._sampler = DraftSampler()
        self._acceptance = Acceptance(NUM_KINDS)
        self._times = StepTimes()  # of the passes
        self._num_hopeless = 0.0  # steps since the last trial

    def keep_distributions(self, vocab_size: int) -> None:
        """Keep the distributions of drafts for a `RejectionSampler`. vocab_size: of the target model."""
        self._sampler.keep_distributions(vocab_size)

    def _least_probability(self, num_rows: int, num_drafting: int) -> float:
        """Return the acceptance above which a draft pays: time of drafting and computing it, per token time."""
        seconds = self._lengths.seconds(num_rows)
        if not self._lengths.is_adaptive or not seconds:
            return 0.0
        count = max(num_drafting, 1)
        computing = self._lengths.seconds(num_rows + count) - seconds
        return MARGIN * num_rows * (computing + self._times.cost.seconds(num_drafting)) / count / seconds

    def _is_worth_drafting(self, drafting: Drafting, num_rows: int) -> bool:
        """Whether the request's next draft is expected to pay, or a new trial is due."""
        least = self._least_probability(num_rows, num_rows)
        if least >= 1.0:  # no draft can pay: the model is too slow for this many rows
            self._num_hopeless += 1 / num_rows  # this method is called for each row
            if self._num_hopeless < STEPS_BETWEEN_TRIALS:
                return False
            self._num_hopeless = 0.0
            return True
        if self._acceptance.of_any(drafting.record) > least:
            drafting.pause, drafting.num_paused = FIRST_PAUSE, 0
            return True
        drafting.num_paused += 1
        if drafting.num_paused < drafting.pause:
            return False
        drafting.pause, drafting.num_paused = min(2 * drafting.pause, LONGEST_PAUSE), 0
        return True

    def _add_draft(self, drafting: Drafting, token_id: TokenId, logprob: float, distribution: Tensor | None) -> None:
        """Add a draft. logprob: that the model gives it. distribution: that it was drawn from, if that is kept."""
        probability = math.exp(logprob)
        if distribution is not None:
            drafting.distributions.append(distribution)
            probability = float(distribution.max())  # whether a draft is computed must not depend on its token
        kind = min(int(NUM_KINDS * probability), NUM_KINDS - 1)
        self._add_draft_of_kind(drafting, token_id, kind)

    def _add_draft_of_kind(self, drafting: Drafting, token_id: TokenId, kind: int) -> None:
        accepted = self._acceptance.of_kind(drafting.record, kind)
        drafting.drafts.token_ids.append(token_id)
        drafting.drafts.acceptance.append(accepted)
        drafting.record.drafts.append(token_id)
        drafting.record.kinds.append(kind)
        drafting.probability *= accepted


def params_of_drafts(params: SamplingParams, vocab_size: int) -> SamplingParams:
    """Return parameters for sampling a request's drafts, with the same noise as its tokens.

    vocab_size: of the draft model.
    """
    return replace(
        params, logprobs=0, prompt_logprobs=None, grammar="", bad_words=(), pooling="", min_tokens=0,
        allowed_token_ids=tuple(token for token in params.allowed_token_ids if token < vocab_size),
        logit_bias=tuple((token, bias) for token, bias in params.logit_bias if token < vocab_size),
    )  # fmt: skip
