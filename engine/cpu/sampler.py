"""Host sampler: one token per row of logits, each row with its own parameters and its own noise.

Order: changes by `engine/logit_rules`, temperature, top-k, top-p, min-p, then the largest of logit / T + Gumbel
noise. All tokens that tie at a threshold are kept, so that the result does not depend on the order of a sort. Rows
are independent: a row that cannot be sampled from gets an error, the others their tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from common.wings import has_wing
from engine.request import SamplingParams, TokenLogprobs
from engine.request_states import RequestState
from engine.runner import NOT_FINITE, NOTHING_ALLOWED
from kernels.gumbel import exponential_noise, noise_key

HAS_RULES = has_wing("engine.logit_rules")
if HAS_RULES:
    from engine.logit_rules.logits import apply_rules
if has_wing("engine.logprobs"):  # without it no request asks for log-probabilities
    from engine.logprobs.logprobs import token_logprobs

NUM_CANDIDATES = 256  # of truncated sampling's first try: the likeliest 256 of 49152 take 0.13 ms, 1024 take 0.55
ROWS_AT_ONCE = 4  # full-vocabulary noise: 4 rows x 49152 x 4 bytes stay in a core's cache


@dataclass(slots=True)
class SampledTokens:
    """token_ids: one per row; a negative one is the reason why there is none, see `no_token_error`.
    logprobs: (row, its log-probabilities) of rows that ask for them.
    """

    token_ids: list[int]
    logprobs: list[tuple[int, TokenLogprobs]]


class Sampler:
    """Samples tokens. This one has no state between calls."""

    def sample(self, logits: Tensor, requests: Sequence[RequestState], positions: Sequence[int]) -> SampledTokens:
        """Sample a token of `requests[i]` at `positions[i]` from row i of logits (n, vocab), which stay unchanged."""
        if all(map(_is_plain_greedy, requests)):
            best, token_ids = logits.max(dim=-1)
            return _checked(token_ids.tolist(), best.tolist(), logits, requests)
        original = logits.float()
        changed = _changed_logits(original, requests, positions)
        best, token_ids = changed.max(dim=-1)
        random = [index for index, request in enumerate(requests) if request.params.temperature > 0]
        if random:
            token_ids[random] = self._sample_random(
                changed[random], [requests[i] for i in random], [positions[i] for i in random], random
            )
        return _checked(token_ids.tolist(), best.tolist(), original, requests)

    def _sample_random(
        self, logits: Tensor, requests: Sequence[RequestState], positions: Sequence[int], rows: Sequence[int]
    ) -> Tensor:
        """Sample rows with a temperature: changed logits (n, vocab) -> token ids (n,).

        rows: their indices in the call of `sample`.
        """
        return sample_with_noise(logits, [request.params for request in requests], positions)


def _is_plain_greedy(request: RequestState) -> bool:
    return request.params.temperature == 0 and not (request.wants_logprobs or request.changes_logits)


def _changed_logits(logits: Tensor, requests: Sequence[RequestState], positions: Sequence[int]) -> Tensor:
    """Return a copy with every row's parameters and hook applied, or `logits` if no row has any."""
    if not any(request.changes_logits for request in requests):
        return logits
    changed = logits.clone()
    if HAS_RULES:
        apply_rules(changed, requests, positions)
    for index, request in enumerate(requests):
        if request.hook is not None:
            request.hook(request, changed[index])
    return changed


def _checked(
    token_ids: list[int], best: list[float], original: Tensor, requests: Sequence[RequestState]
) -> SampledTokens:
    """Replace the token of rows without a finite best logit by the reason; add log-probabilities asked for."""
    for index, value in enumerate(best):
        if not -1e30 < value < 1e30:  # also false for NaN
            token_ids[index] = NOTHING_ALLOWED if value == float("-inf") else NOT_FINITE
    asking = [i for i, request in enumerate(requests) if request.params.logprobs is not None and token_ids[i] >= 0]
    if not asking:
        return SampledTokens(token_ids, [])
    counts = [requests[index].params.logprobs or 0 for index in asking]
    entries = token_logprobs(original[asking], [token_ids[index] for index in asking], counts)
    return SampledTokens(token_ids, list(zip(asking, entries, strict=True)))


def sample_with_noise(logits: Tensor, params: Sequence[SamplingParams], positions: Sequence[int]) -> Tensor:
    """Sample rows with a temperature: changed logits (n, vocab) -> token ids (n,), with each request's noise."""
    scaled, truncated, whole = scaled_logits(logits, params)
    keys = noise_keys([param.seed or 0 for param in params], positions, logits.device)
    token_ids = torch.empty(len(params), dtype=torch.int64, device=logits.device)
    if truncated:
        token_ids[truncated] = _sample_truncated(scaled[truncated], keys[truncated], [params[i] for i in truncated])
    if whole:
        token_ids[whole] = sample_whole(scaled[whole], keys[whole])
    return token_ids


def noise_keys(seeds: Sequence[int], positions: Sequence[int], device: torch.device) -> Tensor:
    """Return the keys (n, 2) for `exponential_noise`."""
    keys = [noise_key(seed, position) for seed, position in zip(seeds, positions, strict=True)]
    return torch.tensor(keys, dtype=torch.int32, device=device)


def scaled_logits(logits: Tensor, params: Sequence[SamplingParams]) -> tuple[Tensor, list[int], list[int]]:
    """Return logits / temperature, shifted to at most 0; the rows that top-k, top-p or min-p truncate; the others."""
    temperatures = torch.tensor([max(param.temperature, 1e-5) for param in params], device=logits.device)[:, None]
    # Subtracting the maximum first keeps tiny temperatures finite.
    scaled = (logits - logits.amax(dim=-1, keepdim=True)) / temperatures
    truncated: list[int] = []
    whole: list[int] = []
    for index, param in enumerate(params):
        (truncated if param.truncates else whole).append(index)
    return scaled, truncated, whole


def sample_whole(scaled: Tensor, keys: Tensor) -> Tensor:
    """Sample among all tokens: scaled logits (n, vocab), keys (n, 2) -> token ids (n,)."""
    all_ids = torch.arange(scaled.shape[1], dtype=torch.int32, device=scaled.device)[None]
    winners = [
        (part - exponential_noise(part_keys, all_ids).log_()).argmax(dim=-1)
        for part, part_keys in zip(torch.split(scaled, ROWS_AT_ONCE), torch.split(keys, ROWS_AT_ONCE), strict=True)
    ]
    return torch.cat(winners)


def _sample_truncated(scaled: Tensor, keys: Tensor, params: Sequence[SamplingParams]) -> Tensor:
    """Sample as `sample_whole` does, among the tokens that top-k, top-p and min-p keep.

    Tries the `NUM_CANDIDATES` likeliest tokens first, because sorting whole rows costs milliseconds. A row whose
    threshold is at or below the last of them is sampled again from all tokens.
    """
    values, ids = scaled.topk(min(scaled.shape[1], NUM_CANDIDATES), dim=-1)
    thresholds, incomplete = find_thresholds(scaled, values, params)
    scores = values - exponential_noise(keys, ids.int()).log_()
    scores.masked_fill_(values < thresholds, float("-inf"))
    token_ids = ids.gather(1, scores.argmax(dim=-1, keepdim=True))[:, 0]
    for index in incomplete:
        row = scaled[index : index + 1]
        row = row.masked_fill(row < thresholds[index], float("-inf"))
        token_ids[index] = sample_whole(row, keys[index : index + 1])[0]
    return token_ids


def find_thresholds(scaled: Tensor, values: Tensor, params: Sequence[SamplingParams]) -> tuple[Tensor, list[int]]:
    """Return the smallest scaled logit that each row keeps (n, 1), and the rows that may keep more than `values`.

    values: the largest of each row, in descending order.
    """
    num_values, incomplete = values.shape[1], list[int]()
    thresholds = _thresholds(values, scaled.logsumexp(dim=-1, keepdim=True), params)
    if num_values == scaled.shape[1]:
        return thresholds, incomplete
    reaches_end = (values[:, -1:] >= thresholds)[:, 0].tolist()
    for index, param in enumerate(params):
        # With a top-k beyond the candidates, top-p also lacks the total mass that it is relative to.
        if reaches_end[index] or param.top_k >= num_values:
            row = scaled[index : index + 1]
            ordered = row.sort(dim=-1, descending=True).values
            thresholds[index] = _thresholds(ordered, row.logsumexp(dim=-1, keepdim=True), [param])[0]
            incomplete.append(index)
    return thresholds, incomplete


def _thresholds(values: Tensor, normalizer: Tensor, params: Sequence[SamplingParams]) -> Tensor:
    """Return the smallest scaled logit that each row keeps (n, 1).

    values: (n, k) in descending order; normalizer: (n, 1) log-sum of the whole row. If the `values` of a row end
    before its threshold is reached, the result is at or below the last value.
    """
    device = values.device
    num_values = values.shape[1]
    top_k = torch.tensor([param.top_k or num_values for param in params], device=device).clamp_(max=num_values)
    has_top_k = torch.tensor([param.top_k > 0 for param in params], device=device)[:, None]
    top_p = torch.tensor([param.top_p for param in params], device=device)[:, None]
    min_p = torch.tensor([param.min_p for param in params], device=device)[:, None]
    kth = values.gather(1, top_k[:, None] - 1)
    floor = torch.where(has_top_k, kth, float("-inf"))
    survives = values >= floor
    # top-p applies after top-k: normalize over the tokens that top-k kept.
    mass = torch.where(survives, (values - normalizer).exp(), 0.0)
    total = torch.where(has_top_k, mass.sum(dim=-1, keepdim=True), 1.0)
    reached = mass.cumsum(dim=-1) >= top_p * total
    first = torch.where(reached.any(dim=-1, keepdim=True), reached.int().argmax(dim=-1, keepdim=True), num_values - 1)
    by_mass = torch.where(top_p < 1.0, values.gather(1, first), float("-inf"))
    by_ratio = values[:, :1] + min_p.log()  # log 0 = -inf: off
    return torch.maximum(torch.maximum(floor, by_mass), by_ratio)
