"""Rows with processed logits or requested log-probabilities are sampled on the device, without the host."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from common.grammar import grammar
from common.model_files import resolve_model
from common.text.load import load_tokenizer
from engine.config import GpuConfig
from engine.engine import Engine
from engine.gpu.steps.rows import RowChanges
from engine.loader import load
from engine.logit_rules import changed_rows, logits_columns
from engine.logit_rules.logits import apply_params
from engine.logit_rules.logits_columns import LogitsColumns
from engine.request import RequestId, SamplingParams, TokenLogprobs
from engine.request_states import RequestState
from tests.gpu.test_engine import ON_GPU, PROMPTS, assert_same_logprobs, open_gpu, reference

ENDLESS: dict[str, Any] = {"max_tokens": 9, "ignore_eos": True}
PARAMS = [
    SamplingParams(temperature=0.0, logprobs=3, **ENDLESS),
    SamplingParams(temperature=1.0, seed=2, logprobs=0, repetition_penalty=1.4, **ENDLESS),
    SamplingParams(temperature=0.9, seed=3, presence_penalty=0.7, frequency_penalty=0.4, logprobs=2, **ENDLESS),
    SamplingParams(temperature=0.0, frequency_penalty=1.5, logit_bias=((5, 3.0), (9, -50.0), (5, 1.0)), **ENDLESS),
]
MASKED = [
    SamplingParams(temperature=0.0, allowed_token_ids=(3, 8, 40, 96), **ENDLESS),
    SamplingParams(temperature=1.0, seed=5, bad_words=((7,), (1, 2), (4,)), **ENDLESS),
    SamplingParams(max_tokens=9, temperature=1.2, seed=6, min_tokens=4, stop_token_ids=tuple(range(0, 97, 2))),
    SamplingParams(temperature=0.0, frequency_penalty=-2.0, **ENDLESS),
]
# Over byte tokens: digits and capitals are among the 97 tokens.
GRAMMARS = [
    SamplingParams(max_tokens=9, temperature=0.0, grammar=grammar.regex("([0-9][A-Z]){20}"), logprobs=1),
    SamplingParams(max_tokens=9, temperature=1.0, seed=7, grammar=grammar.json_schema({"type": "array"})),
    SamplingParams(max_tokens=9, temperature=1.0, seed=8, grammar=grammar.regex("[A-F]*"), repetition_penalty=1.3),
    SamplingParams(temperature=0.0, **ENDLESS),
]


@pytest.fixture(autouse=True)
def _byte_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """Use a tokenizer of bytes, since the tiny model has none."""
    monkeypatch.setattr(load, "load_tokenizer", lambda _: load_tokenizer(resolve_model("dry-run")))


def run(made: Engine, params: list[SamplingParams]) -> list[tuple[list[int], list[TokenLogprobs]]]:
    """Run the requests. Returns tokens and log-probabilities of each."""
    requests = [made.add_request(prompt, each) for prompt, each in zip(PROMPTS, params, strict=True)]
    found: dict[str, list[TokenLogprobs]] = {request.request_id: [] for request in requests}
    while made.has_work():
        for output in made.step().outputs:
            assert output.error is None
            found[output.request.request_id] += output.logprobs
    return [(request.output_token_ids, found[request.request_id]) for request in requests]


@pytest.mark.parametrize("params", [PARAMS, MASKED, GRAMMARS], ids=["penalties", "masks", "grammars"])
@pytest.mark.parametrize("rows_at_once", [32, 1])
def test_tokens_and_logprobs_equal_those_of_the_plain_engine(
    params: list[SamplingParams], rows_at_once: int, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(changed_rows, "MAX_CHANGED_ROWS", rows_at_once)
    monkeypatch.setattr(logits_columns, "MAX_CHANGED_ROWS", rows_at_once)
    want = run(reference(model), params)
    made, _ = open_gpu(model, monkeypatch, GpuConfig())
    for (tokens, entries), (other_tokens, others) in zip(run(made, params), want, strict=True):
        assert tokens == other_tokens
        assert_same_logprobs(entries, others)


def test_only_masks_that_follow_tokens_wait_for_the_step_before(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made, runner = open_gpu(model, monkeypatch, GpuConfig())
    needed: dict[bool, set[str]] = {False: set(), True: set()}
    ask = runner.needs_known_tokens

    def asked(plan: Any) -> bool:
        needs = ask(plan)
        needed[needs] |= {row.request_id for row in plan.rows}
        return needs

    monkeypatch.setattr(runner, "needs_known_tokens", asked)
    run(made, PARAMS)
    assert not needed[True]
    run(made, [*MASKED[:1], SamplingParams(temperature=0.0, bad_words=((7,),), **ENDLESS), *MASKED[2:]])
    assert not needed[True]
    run(made, MASKED)
    assert needed[True]


def test_a_row_without_an_allowed_token_fails_alone(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made, _ = open_gpu(model, monkeypatch, GpuConfig())
    nothing = made.add_request(PROMPTS[0], SamplingParams(allowed_token_ids=(4,), bad_words=((4,),), **ENDLESS))
    other = made.add_request(PROMPTS[1], SamplingParams(temperature=0.0, **ENDLESS))
    errors = {}
    while made.has_work():
        errors |= {output.request: output.error for output in made.step().outputs if output.error}
    assert errors == {nothing: "no token is allowed at this position"}
    assert len(other.output_token_ids) == 9


def state(name: str, params: SamplingParams, output: list[int]) -> RequestState:
    return RequestState(RequestId(name), [3, 8, 8, 40, *output], 4, params, frozenset({2}))


def test_rules_move_with_their_rows() -> None:
    """Requests in three rows come, move and go; logits always equal those of `apply_params`."""
    device = torch.device("cuda" if ON_GPU else "cpu")
    columns = LogitsColumns(4, 97, device)
    logits = torch.randn(5, 97, device=device)
    penalized = state("a", PARAMS[2], [9, 9, 40])
    masked = state("b", SamplingParams(min_tokens=3, max_tokens=9, repetition_penalty=0.5), [1])
    plain = state("c", SamplingParams(), [])
    biased = state("d", PARAMS[3], [5])

    def check(rows: dict[int, RequestState]) -> None:
        owners = list(rows.values())
        positions = [len(owner.token_ids) for owner in owners]
        sources = list(range(len(rows)))[::-1]
        found = columns.changed(logits, sources, list(rows), owners, positions)
        for k, owner in enumerate(owners):
            want = logits[sources[k]].clone()
            copy = RequestState(owner.request_id, owner.token_ids, 4, owner.params, owner.eos_token_ids)
            if owner.changes_logits:
                apply_params(want, copy, positions[k])
            torch.testing.assert_close(found[k], want, rtol=1e-6, atol=1e-5)

    columns.apply(RowChanges(fresh=[(0, plain), (1, penalized), (3, masked)]))
    check({1: penalized, 0: plain, 3: masked})
    columns.count(torch.tensor([1, 3], device=device), torch.tensor([9, 77], device=device))
    penalized.token_ids.append(9)
    masked.token_ids.append(77)
    check({1: penalized, 3: masked})
    columns.apply(RowChanges(fresh=[(0, biased)], moved=[(3, 2)]))
    columns.apply(RowChanges(fresh=[(3, plain)]))
    masked.token_ids.append(50)  # min_tokens is reached now: the mask changes
    columns.count(torch.tensor([2], device=device), torch.tensor([50], device=device))
    check({2: masked, 3: plain, 0: biased, 1: penalized})
