"""Decode rows of several queries: drafts change no token, on a GPU or through Triton's interpreter."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

import engine.speculation.on_gpu.verified_queries as verify_module
from engine.config import GpuConfig
from engine.engine import Engine
from engine.request import Request, SamplingParams, TokenLogprobs
from engine.speculation.drafter import Drafter, Proposal
from kernels.gpu.speculation.paged_verify import paged_verify
from tests.engine.driving import num_drafts
from tests.engine.speculation.drafters import MakeOracle, draft_with, knows, of_one_kind
from tests.gpu.test_engine import PROMPTS, assert_same_logprobs, open_gpu, reference

PLAIN = SamplingParams(max_tokens=9, temperature=0.0, ignore_eos=True)
PARAMS = [
    replace(PLAIN, logprobs=2),
    replace(PLAIN, temperature=1.0, seed=5, top_p=0.9),
    replace(PLAIN, temperature=0.8, seed=6, presence_penalty=0.7, logprobs=0),  # takes no drafts
    replace(PLAIN, ignore_eos=False, stop_token_ids=tuple(range(40, 60))),
]
MAX_TOKENS = 16  # of a step, drafts included


Answers = tuple[list[Request], dict[str, list[TokenLogprobs]]]


def run(made: Engine) -> Answers:
    """Run all prompts, the last one later. Returns requests and their log-probabilities."""
    requests = [made.add_request(prompt, params) for prompt, params in zip(PROMPTS[:3], PARAMS, strict=False)]
    found: dict[str, list[TokenLogprobs]] = {}
    while made.has_work():
        for output in made.step().outputs:
            assert output.error is None
            found.setdefault(output.request.request_id, []).extend(output.logprobs)
        if made.num_steps == 4:
            requests.append(made.add_request(PROMPTS[3], PARAMS[3]))
    assert made.num_failed_steps == 0
    return requests, found


def assert_same_answers(ours: Answers, theirs: Answers) -> None:
    for request, other in zip(ours[0], theirs[0], strict=True):
        assert request.output_token_ids == other.output_token_ids
        assert_same_logprobs(ours[1][request.request_id], theirs[1][other.request_id])


@pytest.mark.parametrize("accuracy", [0.0, 0.6, 1.0])
def test_drafts_change_no_token(accuracy: float, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = reference(model)
    plain, told = run(expected)
    answers = [request.prompt_token_ids + request.output_token_ids for request in plain]
    make_drafter = MakeOracle(knows(answers), accuracy, 97)
    draft_with(monkeypatch, make_drafter, on_gpu=True)
    made, _ = open_gpu(model, monkeypatch, GpuConfig(), num_speculative_tokens=4, max_num_seqs=MAX_TOKENS)
    assert_same_answers(run(made), (plain, told))
    drafted, accepted = num_drafts(made)
    assert drafted > 8
    assert accepted < drafted * 0.2 if accuracy == 0 else accepted > drafted * accuracy * 0.3
    if accuracy == 1:
        assert made.num_steps < expected.num_steps


def test_drafts_over_8_bit_kv_change_no_token(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings: dict[str, Any] = {"kv_cache_dtype": "fp8", "max_num_seqs": MAX_TOKENS}
    made, _ = open_gpu(model, monkeypatch, GpuConfig(), **settings)
    plain, _ = run(made)
    answers = [request.prompt_token_ids + request.output_token_ids for request in plain]
    draft_with(monkeypatch, MakeOracle(knows(answers), 0.6, 97), on_gpu=True)
    drafted, _ = open_gpu(model, monkeypatch, GpuConfig(), num_speculative_tokens=4, **settings)
    requests, _ = run(drafted)
    assert [request.output_token_ids for request in requests] == [request.output_token_ids for request in plain]
    assert 3 < num_drafts(drafted)[1] < num_drafts(drafted)[0]


def test_drafts_keep_to_decode_steps_within_a_graph(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No drafts next to a prompt, beyond the largest graph, or if logits have rules."""
    draft_with(monkeypatch, lambda: Zeros(), on_gpu=True)
    made, _ = open_gpu(model, monkeypatch, GpuConfig(), num_speculative_tokens=4, max_num_seqs=7)
    for prompt, params in zip(PROMPTS[:3], (PLAIN, PLAIN, PARAMS[2]), strict=True):
        made.add_request(prompt, params)
    made.step()
    plan = made.step().plan
    assert [len(row.draft_token_ids) for row in plan.rows] == [4, 0, 0]
    assert [row.num_tokens for row in plan.rows] == [5, 1, 1]
    made.add_request(PROMPTS[3], PLAIN)
    assert sum(row.num_tokens for row in made.step().plan.rows) == 3 + len(PROMPTS[3])


def test_queries_of_a_row_attend_as_a_group(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    counts: list[list[int]] = []

    def seen(
        q: Tensor, pool: Tensor, layer: int, tables: Tensor, lengths: Tensor, groups: Tensor, *args: Any
    ) -> Tensor:
        counts.append([count for count in groups[2].tolist() if count])
        return paged_verify(q, pool, layer, tables, lengths, groups, *args)

    monkeypatch.setattr(verify_module, "paged_verify", seen)
    draft_with(monkeypatch, Zeros, on_gpu=True)
    eager = GpuConfig(use_cuda_graph=False)
    made, _ = open_gpu(model, monkeypatch, eager, num_speculative_tokens=9, max_num_seqs=MAX_TOKENS)
    for prompt in PROMPTS[:2]:
        made.add_request(prompt, replace(PLAIN, max_tokens=12))
    while made.has_work():
        made.step()
    assert [8, 2, 6] in counts, "rows of 10 and 6 queries, of which 8 fill a group of this model"


class Zeros(Drafter):
    def propose(self, _: list[int], max_tokens: int) -> Proposal:
        return of_one_kind([0] * max_tokens)
