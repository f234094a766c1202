"""Rejection sampling of drafts: accept x with probability min(1, p(x) / q(x)), else sample from max(0, p - q).

Leviathan et al. 2023 (arXiv:2211.17192), Chen et al. 2023 (arXiv:2302.01318). p is the distribution that the request
samples from without drafts, q the one that a draft was drawn from, both with its parameters applied. The output is
distributed as p for any q, as long as the decision whether a step verifies a draft does not depend on its token: if
drafts of x were left out, x would be too rare. A position's draft, acceptance and replacement have separate noise,
all functions of (seed, position).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from engine.cpu.sampler import (
    NUM_CANDIDATES,
    SampledTokens,
    Sampler,
    find_thresholds,
    noise_keys,
    sample_whole,
    scaled_logits,
)
from engine.request import RequestId, SamplingParams, TokenId
from engine.request_states import RequestState
from kernels.gumbel import noise_key

ACCEPTANCE, REPLACEMENT = 0x5BF0_3635_D1C2_95A7, 0x2545_F491_4F6C_DD1D  # seeds of noise apart from that of drafts


@dataclass(slots=True, kw_only=True)
class DrawnDrafts:
    """The distributions q that a request's drafts were drawn from, for the positions from `num_known` on, (vocab,)
    each.

    The vocabulary may be smaller than the target model's. Empty if drafts are compared with tokens.
    """

    num_known: int = 0
    distributions: list[Tensor] = field(default_factory=list)

    def distribution_at(self, position: int) -> Tensor | None:
        index = position - self.num_known
        return self.distributions[index] if 0 <= index < len(self.distributions) else None


def is_rejection_sampled(params: SamplingParams) -> bool:
    """Whether drafts of such a request are verified by rejection sampling.

    Greedy requests gain nothing from it. A seed that the client chose promises the same answer, which must not depend
    on where drafts begin.
    """
    return params.temperature > 0 and params.seed_is_drawn


class DraftSampler(Sampler):
    """Samples drafts. distributions: of the last call's rows, if they are kept."""

    def __init__(self) -> None:
        self._vocab_size: int | None = None
        self.distributions: list[Tensor | None] = []

    def keep_distributions(self, vocab_size: int) -> None:
        """Keep distributions from now on. vocab_size: of the target model, whose tokens alone are sampled."""
        self._vocab_size = vocab_size

    def sample(self, logits: Tensor, requests: Sequence[RequestState], positions: Sequence[int]) -> SampledTokens:
        """See Sampler."""
        self.distributions = [None] * len(requests)
        return super().sample(logits[:, : self._vocab_size], requests, positions)

    def _sample_random(
        self, logits: Tensor, requests: Sequence[RequestState], positions: Sequence[int], rows: Sequence[int]
    ) -> Tensor:
        kept = [index for index, request in enumerate(requests) if is_rejection_sampled(request.params)]
        if self._vocab_size is not None and kept:
            found = probabilities(logits[kept], [requests[index].params for index in kept])
            for index, distribution in zip(kept, found.unbind(), strict=True):
                self.distributions[rows[index]] = distribution
        return super()._sample_random(logits, requests, positions, rows)


class RejectionSampler(Sampler):
    """Samples tokens of the target model, and verifies the drafts whose distributions are kept."""

    def _sample_random(
        self, logits: Tensor, requests: Sequence[RequestState], positions: Sequence[int], rows: Sequence[int]
    ) -> Tensor:
        verified: list[int] = []
        others: list[int] = []
        distributions: list[Tensor] = []
        for index, (request, position) in enumerate(zip(requests, positions, strict=True)):
            distribution = _distribution_of_draft(request, position)
            (others if distribution is None else verified).append(index)
            if distribution is not None:
                distributions.append(distribution)
        if not verified:
            return super()._sample_random(logits, requests, positions, rows)
        token_ids = torch.empty(len(requests), dtype=torch.int64, device=logits.device)
        if others:
            token_ids[others] = super()._sample_random(
                logits[others],
                [requests[index] for index in others],
                [positions[index] for index in others],
                [rows[index] for index in others],
            )
        token_ids[verified] = _verified(
            logits[verified],
            [requests[index] for index in verified],
            [positions[index] for index in verified],
            distributions,
        )
        return token_ids


def _distribution_of_draft(request: RequestState, position: int) -> Tensor | None:
    """Return the distribution that the draft at that position was drawn from; None if there is none."""
    if position >= len(request.token_ids) or not isinstance(request.drafter, DrawnDrafts):
        return None
    return request.drafter.distribution_at(position)


def _verified(
    logits: Tensor, requests: Sequence[RequestState], positions: Sequence[int], distributions: Sequence[Tensor]
) -> Tensor:
    """Return the drafts of these rows (n,), with each request's first rejected one replaced; later ones are void."""
    targets = probabilities(logits, [request.params for request in requests])
    seeds = [request.params.seed or 0 for request in requests]
    drafts = [request.token_ids[position] for request, position in zip(requests, positions, strict=True)]
    token_ids = torch.tensor(drafts, device=logits.device)
    accepted = accept(drafts, targets, distributions, seeds, positions)
    rejected: dict[RequestId, int] = {}
    for index, is_accepted in enumerate(accepted):
        if not is_accepted:
            rejected.setdefault(requests[index].request_id, index)
    if wrong := list(rejected.values()):
        token_ids[wrong] = replacements(
            targets[wrong],
            [distributions[index] for index in wrong],
            [seeds[index] for index in wrong],
            [positions[index] for index in wrong],
        )
    return token_ids


def accept(
    drafts: Sequence[TokenId], targets: Tensor, distributions: Sequence[Tensor], seeds: Sequence[int],
    positions: Sequence[int],
) -> list[bool]:  # fmt: skip
    """Return whether each draft is accepted. targets: p (n, vocab). distributions: q, of at most `vocab` tokens."""
    ps = targets.gather(1, torch.tensor(drafts, device=targets.device)[:, None])[:, 0].tolist()
    qs = torch.stack([q[draft] for q, draft in zip(distributions, drafts, strict=True)]).tolist()
    noise = map(acceptance_noise, seeds, positions)
    return [uniform * q < p for uniform, p, q in zip(noise, ps, qs, strict=True)]


def replacements(
    targets: Tensor, distributions: Sequence[Tensor], seeds: Sequence[int], positions: Sequence[int]
) -> Tensor:
    """Sample the replacements of rejected drafts from p (n, vocab) and the q of each: token ids (n,)."""
    rest = targets.clone()
    for row, distribution in zip(rest, distributions, strict=True):
        row[: distribution.shape[0]] -= distribution
    rest.clamp_(min=0.0)
    rest = torch.where(rest.any(dim=-1, keepdim=True), rest, targets)  # p equals q in float32
    keys = noise_keys([seed ^ REPLACEMENT for seed in seeds], positions, rest.device)
    return sample_whole(rest.log_(), keys)


def acceptance_noise(seed: int, position: int) -> float:
    """Return a uniform number in (0, 1)."""
    low, high = (word & 0xFFFFFFFF for word in noise_key(seed ^ ACCEPTANCE, position))
    return (((high << 32 | low) >> 12) + 0.5) * 2.0**-52


def probabilities(logits: Tensor, params: Sequence[SamplingParams]) -> Tensor:
    """The distributions that `sample_with_noise` samples from (n, vocab): zero for tokens that are left out."""
    scaled, truncated, _ = scaled_logits(logits, params)
    if truncated:
        values = scaled[truncated].topk(min(scaled.shape[1], NUM_CANDIDATES), dim=-1).values
        thresholds, _ = find_thresholds(scaled[truncated], values, [params[index] for index in truncated])
        scaled[truncated] = scaled[truncated].masked_fill(scaled[truncated] < thresholds, float("-inf"))
    return scaled.softmax(dim=-1)
