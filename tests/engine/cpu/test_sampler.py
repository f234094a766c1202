"""Samples: their distribution, the effect of each parameter, and that they depend only on seed and position."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from engine.cpu import sampler as sampler_module
from engine.cpu.sampler import SampledTokens, Sampler
from engine.request import RequestId, SamplingParams
from engine.request_states import LogitsHook, RequestState
from engine.runner import NOT_FINITE, NOTHING_ALLOWED, no_token_error
from tests.engine.chi_square import fits

VOCAB_SIZE = 50
EOS = 7


def row_of(
    *, prompt: Sequence[int] = (1, 2, 3), output: Sequence[int] = (), name: str = "a", **params: Any
) -> RequestState:
    """Make a request whose next token is to be sampled."""
    values = {"max_tokens": 1000, "seed": 11, **params}
    return RequestState(RequestId(name), [*prompt, *output], len(prompt), SamplingParams(**values), frozenset([EOS]))


def logits_row(seed: int = 0, size: int = VOCAB_SIZE, spread: float = 2.0) -> Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(seed)) * spread


def hooked(row: RequestState, hook: LogitsHook) -> RequestState:
    row.hook, row.changes_logits = hook, True
    return row


def sample(rows: Sequence[RequestState], logits: Tensor) -> SampledTokens:
    """Sample one token for each row; all rows have the same logits."""
    return sample_each(rows, logits.expand(len(rows), -1).clone())


def sample_each(rows: Sequence[RequestState], logits: Tensor) -> SampledTokens:
    return Sampler().sample(logits, rows, [len(row.token_ids) for row in rows])


def draw_many(logits: Tensor, count: int, **params: Any) -> Counter[int]:
    """Sample at `count` positions with one seed."""
    rows = [row_of(output=[0] * index, **params) for index in range(count)]
    return Counter(sample(rows, logits).token_ids)


def assert_distributed(counts: Counter[int], probabilities: Tensor) -> None:
    assert fits([counts[token_id] for token_id in range(len(probabilities))], probabilities.tolist()) > 1e-6


def test_greedy_takes_the_best_in_any_company() -> None:
    logits = torch.stack([logits_row(seed) for seed in range(4)])
    rows = [row_of(temperature=0.0, name=str(index)) for index in range(4)]
    best = logits.argmax(-1).tolist()
    assert sample_each(rows, logits).token_ids == best
    rows[2] = row_of(temperature=1.0, seed=3)
    mixed = sample_each(rows, logits).token_ids
    assert [mixed[index] for index in (0, 1, 3)] == [best[index] for index in (0, 1, 3)]


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_draws_follow_the_softmax(temperature: float) -> None:
    logits = logits_row()
    counts = draw_many(logits, 6000, temperature=temperature)
    assert_distributed(counts, (logits / temperature).softmax(-1))


def naive_truncation(logits: Tensor, top_k: int, top_p: float, min_p: float) -> Tensor:
    """Compute the truncated probabilities by their definitions, token by token."""
    order = logits.argsort(descending=True).tolist()
    kept = order[:top_k] if top_k else order
    mass = logits[kept].softmax(-1)
    total, nucleus = 0.0, []
    for token_id, probability in zip(kept, mass.tolist(), strict=True):
        nucleus.append(token_id)
        total += probability
        if total >= top_p:
            break
    best = float(logits.softmax(-1).max())
    chosen = [token_id for token_id in nucleus if float(logits.softmax(-1)[token_id]) >= min_p * best]
    result = torch.zeros_like(logits)
    result[chosen] = logits[chosen].softmax(-1)
    return result


TRUNCATIONS = [(5, 1.0, 0.0), (0, 0.7, 0.0), (0, 1.0, 0.1), (20, 0.8, 0.05), (1, 1.0, 0.0), (3, 0.01, 0.9)]


@pytest.mark.parametrize(("top_k", "top_p", "min_p"), TRUNCATIONS)
@pytest.mark.parametrize("num_candidates", [8, 1024])
def test_truncation_keeps_what_its_definition_keeps(
    top_k: int, top_p: float, min_p: float, num_candidates: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With 8 candidates, most of these rows need the second, whole pass."""
    monkeypatch.setattr(sampler_module, "NUM_CANDIDATES", num_candidates)
    logits = logits_row(5)
    counts = draw_many(logits, 1500, temperature=1.0, top_k=top_k, top_p=top_p, min_p=min_p)
    assert_distributed(counts, naive_truncation(logits, top_k, top_p, min_p))


def test_the_candidate_pass_draws_what_the_whole_pass_draws(monkeypatch: pytest.MonkeyPatch) -> None:
    logits = torch.stack([logits_row(seed, 5000) for seed in range(40)])
    rows = [
        row_of(output=[0] * index, temperature=0.8, top_p=(0.3, 0.9, 0.999)[index % 3], top_k=(0, 50)[index % 2])
        for index in range(40)
    ]
    first = sample_each(rows, logits).token_ids
    monkeypatch.setattr(sampler_module, "NUM_CANDIDATES", 5000)
    assert sample_each(rows, logits).token_ids == first


def test_ties_at_a_threshold_are_all_kept() -> None:
    logits = torch.tensor([2.0, 1.0, 1.0, 1.0, 0.0])
    counts = draw_many(logits, 400, temperature=1.0, top_k=2)
    assert set(counts) == {0, 1, 2, 3}


def test_a_draw_depends_on_seed_and_position_only() -> None:
    logits = logits_row(1)
    alone = [sample([row_of(output=[0] * index, temperature=1.0)], logits).token_ids[0] for index in range(60)]
    together = sample([row_of(output=[0] * index, temperature=1.0) for index in range(60)], logits).token_ids
    assert together == alone
    crowd = [row_of(output=[0] * index, temperature=1.0, seed=index + 50, name=str(index)) for index in range(9)]
    assert sample([*crowd, row_of(output=[0] * 5, temperature=1.0)], logits).token_ids[-1] == alone[5]
    # The same position reached by a longer prompt and fewer outputs.
    moved = row_of(prompt=[1, 2, 3, 0, 0, 0], output=[0, 0], temperature=1.0)
    assert sample([moved], logits).token_ids[0] == alone[5]


def test_other_seeds_and_positions_draw_other_tokens() -> None:
    flat = torch.zeros(1000)
    by_position = [sample([row_of(output=[0] * index, temperature=1.0)], flat).token_ids[0] for index in range(50)]
    by_seed = [sample([row_of(temperature=1.0, seed=seed)], flat).token_ids[0] for seed in range(50)]
    large = [sample([row_of(temperature=1.0, seed=(1 << 64) - 1 - seed)], flat).token_ids[0] for seed in range(50)]
    for tokens in (by_position, by_seed, large):
        assert len(set(tokens)) > 40


def test_draws_of_neighbouring_seeds_are_independent() -> None:
    """A draw under seed s says nothing about the one under s + 1 at the same or the next position."""
    flat = torch.zeros(4)
    for shift in (0, 1):
        pairs: Counter[int] = Counter()
        for seed in range(1000):
            first, second = sample(
                [
                    row_of(temperature=1.0, seed=seed),
                    row_of(temperature=1.0, seed=seed + 1, output=[0] * shift),
                ],
                flat,
            ).token_ids
            pairs[4 * first + second] += 1
        assert_distributed(pairs, torch.full((16,), 1 / 16))


@pytest.mark.wing("engine.logprobs")
def test_logprobs_are_those_of_the_unmodified_logits() -> None:
    logits = logits_row(4)
    worst = int(logits.argmin())
    row = hooked(row_of(temperature=0.0, logprobs=3), lambda _request, changed: changed[worst].add_(100.0))
    [(_, entry)] = sample([row], logits).logprobs
    expected = logits.log_softmax(-1)
    assert (entry.token_id, entry.rank) == (worst, VOCAB_SIZE)
    assert entry.logprob == pytest.approx(float(expected[worst]), abs=1e-5)
    assert list(entry.top_token_ids) == expected.topk(3).indices.tolist()
    assert list(entry.top_logprobs) == pytest.approx(expected.topk(3).values.tolist(), abs=1e-5)
    [(_, none)] = sample([row_of(temperature=0.0, logprobs=0)], logits).logprobs
    assert (none.rank, none.top_token_ids) == (1, ())


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_rows_that_cannot_be_drawn_from_fail_alone(temperature: float) -> None:
    logits = torch.stack([logits_row(seed) for seed in range(4)])
    logits[1, 3] = float("nan")
    logits[2, 3] = float("inf")
    rows = [row_of(temperature=temperature, name=str(index)) for index in range(4)]
    hooked(rows[3], lambda _request, row: row.fill_(float("-inf")))
    result = sample_each(rows, logits)
    assert result.token_ids[0] == sample_each(rows[:1], logits[:1]).token_ids[0]
    assert result.token_ids[1:] == [NOT_FINITE, NOT_FINITE, NOTHING_ALLOWED]
    assert "no token is allowed" in no_token_error(rows[3], NOTHING_ALLOWED)


@pytest.mark.parametrize("temperature", [1e-6, 100.0])
def test_extreme_temperatures_stay_finite(temperature: float) -> None:
    logits = logits_row(6, spread=30.0)
    tokens = [sample([row_of(temperature=temperature, seed=seed)], logits) for seed in range(20)]
    assert all(token.token_ids[0] >= 0 for token in tokens)
    if temperature < 1:
        assert {token.token_ids[0] for token in tokens} == {int(logits.argmax())}


def test_a_hook_masks_its_own_request_only() -> None:
    logits = logits_row(7)
    best = int(logits.argmax())

    def forbid_best(_request: RequestState, row: Tensor) -> None:
        row[best] = float("-inf")

    rows = [row_of(temperature=0.0, name="a"), hooked(row_of(temperature=0.0, name="b"), forbid_best)]
    tokens = sample(rows, logits).token_ids
    assert tokens == [best, int(logits.topk(2).indices[1])]


def test_logits_are_left_unchanged() -> None:
    logits = logits_row(8)[None]
    kept = logits.clone()
    rows = [hooked(row_of(temperature=1.0, top_k=3), lambda _request, row: row.mul_(2.0))]
    sample_each(rows, logits)
    assert torch.equal(logits, kept)
