"""Rejection sampling over tiny vocabularies: answers are distributed as without drafts, however these are drawn.

Models are tables of logits by the previous token. Both samplers and `settle` are the engine's; windows of drafts
follow each other until a request has its tokens.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor

from engine.cpu.sampler import Sampler, sample_with_noise
from engine.plan import ScheduledRow, StepResult
from engine.request import RequestId, SamplingParams
from engine.request_states import RequestState
from engine.runner import sampled_queries, settle
from engine.speculation import rejection
from engine.speculation.draft_length import DraftLengths
from engine.speculation.from_model import Drafting, FromModel
from engine.speculation.rejection import (
    DraftSampler,
    RejectionSampler,
    accept,
    acceptance_noise,
    probabilities,
    replacements,
)
from tests.engine.chi_square import fits

VOCAB, NUM_REQUESTS = 8, 1000
LIKELY, UNLIKELY = 1e-3, 1e-6  # seeds are fixed: a right rule always passes, a wrong one is far off
PARAMS = SamplingParams(temperature=1.0, seed=0, seed_is_drawn=True)
FLAT = torch.zeros(VOCAB, VOCAB)
NEVER = float("-inf")
Verified = Callable[[int, Tensor], int]  # how many of a request's drafts, by the first one and what it was drawn from


def table(seed: int, spread: float = 1.0) -> Tensor:
    return spread * torch.randn(VOCAB, VOCAB, generator=torch.Generator().manual_seed(seed))


def only(*token_ids: int) -> Tensor:
    return FLAT.index_fill(1, torch.tensor([t for t in range(VOCAB) if t not in token_ids]), NEVER)


PAIRS: dict[str, tuple[Tensor, Tensor, SamplingParams]] = {
    "alike": (table(1), table(1) + 0.3 * table(2), PARAMS),
    "unlike": (table(1), table(2, 2.0), PARAMS),
    "equal": (table(1), table(1), PARAMS),
    "disjoint": (only(0, 1, 2), only(5, 6), PARAMS),
    "drafts of a token": (table(3), only(4), PARAMS),
    "cold": (table(1), table(4), replace(PARAMS, temperature=0.6)),
    "top-p": (table(1), table(2), replace(PARAMS, top_p=0.7)),
    "top-k and min-p": (table(5), table(6), replace(PARAMS, top_k=5, min_p=0.1)),
    "fewer tokens": (table(1), table(2)[:, :6], PARAMS),
}


def generate(
    target: Tensor, draft: Tensor, params: SamplingParams, num_drafts: int = 2, num_tokens: int = 2,
    verified: Verified = lambda first, distribution: 2, sampler: Sampler | None = None,
    num_requests: int = NUM_REQUESTS,
) -> tuple[list[list[int]], float]:  # fmt: skip
    """Return the answers of many requests to the prompt [0], and the share of first drafts that were accepted."""
    sampler, drafts_from = sampler or RejectionSampler(), DraftSampler()
    drafts_from.keep_distributions(VOCAB)
    states = [
        RequestState(RequestId(str(seed)), [0], 1, replace(params, seed=7 * seed)) for seed in range(num_requests)
    ]
    tried = accepted = 0
    while left := [state for state in states if len(state.output_token_ids) < num_tokens]:
        drafted = [list[int]() for _ in left]
        for state in left:
            state.drafter = Drafting(num_known=len(state.token_ids))
        for position in range(num_drafts):
            last = [(state.token_ids + own)[-1] for state, own in zip(left, drafted, strict=True)]
            places = [len(state.token_ids) + position for state in left]
            found = drafts_from.sample(draft[last], left, places)
            for state, own, token_id, q in zip(
                left, drafted, found.token_ids, drafts_from.distributions, strict=True
            ):
                own.append(token_id)
                state.drafter.distributions.append(q)
        rows, inputs = list[ScheduledRow](), list[int]()
        for state, own in zip(left, drafted, strict=True):
            own = own[: verified(own[0], state.drafter.distributions[0])]
            start = len(state.token_ids) - 1
            inputs += [state.token_ids[-1], *own]
            rows.append(ScheduledRow(state.request_id, start, 1 + len(own), True, draft_token_ids=tuple(own)))
            state.token_ids += own
        sampled = sampled_queries(rows, left, range(len(rows)))
        values = sampler.sample(target[inputs], [entry[2] for entry in sampled], [entry[3] for entry in sampled])
        result = StepResult.of_rows(len(rows))
        settle(result, sampled, values.token_ids)
        assert not result.errors
        with_drafts = [index for index, row in enumerate(rows) if row.draft_token_ids]
        tried += len(with_drafts)
        accepted += sum(len(result.token_ids[index]) > 1 for index in with_drafts)
    return [state.output_token_ids[:num_tokens] for state in states], accepted / max(tried, 1)


def likelihoods(answers: list[list[int]], target: Tensor, params: SamplingParams) -> tuple[float, float]:
    """Return the p-values of first tokens, and of pairs, under p."""
    p = probabilities(target, [params] * VOCAB)
    firsts, pairs = Counter(answer[0] for answer in answers), Counter(map(tuple, answers))
    grid = list(product(range(VOCAB), repeat=2))
    return (
        fits([firsts[token] for token in range(VOCAB)], p[0].tolist()),
        fits([pairs[pair] for pair in grid], [float(p[0, one] * p[one, other]) for one, other in grid]),
    )


@pytest.mark.parametrize("name", PAIRS)
def test_answers_are_distributed_as_without_drafts(name: str) -> None:
    target, draft, params = PAIRS[name]
    answers, accepted = generate(target, draft, params)
    assert min(likelihoods(answers, target, params)) > LIKELY
    if name in ("disjoint", "equal"):
        assert accepted == (name == "equal")


@pytest.mark.parametrize("name", ["unlike", "top-p"])
def test_more_drafts_are_accepted_than_by_coupled_noise(name: str) -> None:
    """The common mass of both distributions is the upper bound. Coupled answers equal those without drafts."""
    target, draft, params = PAIRS[name]
    _, by_rejection = generate(target, draft, params, num_tokens=1)
    answers, coupled = generate(target, draft, params, num_tokens=1, sampler=Sampler())
    p, q = (probabilities(table[:1], [params])[0] for table in (target, draft))
    common = float(torch.minimum(p, q).sum())
    assert by_rejection == pytest.approx(common, abs=0.04)
    assert common / (2 - common) - 0.04 < coupled < by_rejection
    plain = sample_with_noise(
        target[[0] * NUM_REQUESTS],
        [replace(params, seed=7 * seed) for seed in range(NUM_REQUESTS)],
        [1] * NUM_REQUESTS,
    )
    assert [answer[0] for answer in answers] == plain.tolist()


def accept_all(drafts: Sequence[int], *_: object) -> list[bool]:
    return [True] * len(drafts)


def accept_by_target(
    drafts: Sequence[int], targets: Tensor, qs: Sequence[Tensor], *noise: Sequence[int]
) -> list[bool]:
    """Accept with p(x), as if q were a point mass at x."""
    return accept(drafts, targets, [torch.ones_like(q) for q in qs], *noise)


def replace_by_target(targets: Tensor, qs: Sequence[Tensor], *noise: Sequence[int]) -> Tensor:
    """Sample the replacement from p, without subtracting q."""
    return replacements(targets, [torch.zeros_like(q) for q in qs], *noise)


@pytest.mark.parametrize("wrong", [accept_all, accept_by_target, replace_by_target])
def test_wrong_rules_are_found(wrong: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    name = "replacements" if wrong is replace_by_target else "accept"
    monkeypatch.setattr(rejection, name, wrong)
    target, draft, params = PAIRS["unlike"]
    answers, _ = generate(target, draft, params)
    assert max(likelihoods(answers, target, params)) < UNLIKELY


def test_drafts_must_not_be_chosen_by_what_was_drawn() -> None:
    """The number of verified drafts may depend on q and earlier drafts; if it depends on a draft, answers change."""
    target, draft, params = PAIRS["unlike"]
    by_token, _ = generate(
        target, draft, params, verified=lambda first, q: 2 * (float(q[first]) > 0.3), num_requests=10_000
    )
    assert max(likelihoods(by_token, target, params)) < UNLIKELY
    by_earlier, _ = generate(target, draft, params, verified=lambda first, q: 1 + first % 2)
    by_distribution, _ = generate(target, draft, params, verified=lambda first, q: 2 * (float(q.max()) > 0.5))
    for answers in (by_earlier, by_distribution):
        assert min(likelihoods(answers, target, params)) > LIKELY


def test_the_kind_of_a_draft_is_that_of_its_distribution() -> None:
    """So its profit is judged without the drawn token; drafts that are compared with tokens have their own kind."""
    q = torch.tensor([0.65, 0.25, 0.15])
    kinds = []
    for distribution in (q, None):
        drafting, proposer = Drafting(), FromModel(DraftLengths())
        for token_id in range(3):
            proposer._add_draft(drafting, token_id, float(q[token_id].log()), distribution)
        kinds.append(drafting.record.kinds)
    assert kinds == [[6, 6, 6], [6, 2, 1]]


def test_greedy_and_seeded_requests_are_compared_with_tokens() -> None:
    target, draft, _ = PAIRS["alike"]
    for params in (replace(PARAMS, temperature=0.0), replace(PARAMS, seed_is_drawn=False)):
        by_rejection, coupled = (
            generate(target, draft, params, num_tokens=3, sampler=sampler, num_requests=300)
            for sampler in (RejectionSampler(), Sampler())
        )
        assert by_rejection == coupled


def test_equal_distributions_replace_nothing() -> None:
    """If a draft is rejected only by rounding, its replacement is sampled from p."""
    p = torch.tensor([0.25, 0.75]).repeat(2000, 1)
    seeds, places = range(2000), [3] * 2000
    assert all(accept([0] * 2000, p, [*p], seeds, places))
    found = replacements(p, [*p], seeds, places)
    assert fits(torch.bincount(found).tolist(), [0.25, 0.75]) > LIKELY


def test_noise_of_a_position() -> None:
    """Noise of drafts, of acceptance and of replacements is uniform and independent."""
    count = 4000
    seeds, places = range(count), [5] * count
    drawn = sample_with_noise(FLAT[[0] * count], [replace(PARAMS, seed=seed) for seed in seeds], places)
    replaced = replacements(torch.full((count, VOCAB), 1 / VOCAB), [torch.zeros(VOCAB)] * count, seeds, places)
    uniform = torch.tensor([acceptance_noise(seed, 5) for seed in seeds], dtype=torch.float64)
    assert 0 < float(uniform.min()) < float(uniform.max()) < 1
    cells = (drawn * VOCAB + replaced) * 4 + (uniform * 4).long()
    assert fits(torch.bincount(cells, minlength=256).tolist(), [1 / 256] * 256) > LIKELY
