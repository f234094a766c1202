"""CPU engines, and requests of all kinds for engines with drafts."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest

from engine.assembly import EngineParts, assemble
from engine.config import EngineConfig
from engine.engine import Engine
from engine.plan import ScheduledRow
from engine.request import Request, RequestOutput, SamplingParams, TokenLogprobs
from tests.engine.driving import finish
from tests.engine.tiny_models import VOCAB_SIZE

PLAIN = SamplingParams(max_tokens=16, temperature=0.0, ignore_eos=True)
PARAMS = [
    PLAIN,
    replace(PLAIN, temperature=1.0, seed=5),
    replace(PLAIN, temperature=0.8, seed=6, top_k=40, top_p=0.9, logprobs=3),
    replace(PLAIN, repetition_penalty=1.3, frequency_penalty=0.4, presence_penalty=0.3),
    replace(PLAIN, temperature=1.2, seed=7, presence_penalty=1.0, logprobs=0, prompt_logprobs=1),
    replace(PLAIN, logit_bias=((9, 2.0), (11, -5.0)), bad_words=((10,), (12, 13))),
    replace(PLAIN, allowed_token_ids=tuple(range(20, 40)), temperature=1.0, seed=8),
    replace(PLAIN, ignore_eos=False, min_tokens=9, stop_token_ids=tuple(range(8, 60))),
]
PROMPTS = [[(7 * i + 11 * j) % (VOCAB_SIZE - 8) + 8 for j in range(3 + 5 * i)] for i in range(len(PARAMS))]
SETTINGS = [
    {},
    {"max_num_batched_tokens": 8, "max_num_seqs": 4},
    {"num_gpu_blocks": 34, "block_size": 4, "preemption": "recompute"},
    {"num_gpu_blocks": 34, "block_size": 4, "preemption": "swap", "host_tier_gb": 0.01},
]


def open_parts(model: Path, **settings: object) -> EngineParts:
    base = {"model": str(model), "device": "cpu", "dtype": "float32", "num_gpu_blocks": 256, "num_threads": 1}
    return assemble(EngineConfig(**{**base, **settings}))  # type: ignore[arg-type]


def run(made: Engine) -> tuple[list[Request], list[RequestOutput]]:
    """Run all prompts, each with its parameters. Returns their outputs in the order of the prompts."""
    requests = [made.add_request(prompt, params) for prompt, params in zip(PROMPTS, PARAMS, strict=True)]
    outputs = finish(made)
    assert made.kv.pool.num_used == 0
    return requests, outputs


def rows_with_drafts(made: Engine) -> list[ScheduledRow]:
    """Step until the requests have ended. Returns the rows with drafts of all steps."""
    rows: list[ScheduledRow] = []
    while made.has_work():
        rows += [row for row in made.step().plan.rows if row.draft_token_ids]
    return rows


@cache
def plain_run(model: Path, **settings: object) -> tuple[list[Request], list[RequestOutput]]:
    """Run the prompts without drafts."""
    return run(open_parts(model, **settings).engine)


def check_unchanged(parts: EngineParts, model: Path, **settings: object) -> None:
    """Compare tokens and log-probabilities with an engine without drafts; the second run hits the prefix cache."""
    plain, plain_outputs = plain_run(model, quant_mode="none", **settings)
    for _ in range(2):
        requests, outputs = run(parts.engine)
        for request, expected in zip(requests, plain, strict=True):
            assert request.output_token_ids == expected.output_token_ids
            found, told = logprobs_of(request, outputs), logprobs_of(expected, plain_outputs)
            assert [entry.token_id for entry in found] == (
                request.output_token_ids if request.params.logprobs is not None else []
            )
            for entry, other in zip(found, told, strict=True):
                assert (entry.token_id, entry.rank) == (other.token_id, other.rank)
                assert entry.logprob == pytest.approx(other.logprob, abs=1e-4)
                assert entry.top_token_ids == other.top_token_ids
    if "preemption" in settings:
        assert parts.engine.load().num_preemptions > 0


def logprobs_of(request: Request, outputs: list[RequestOutput]) -> list[TokenLogprobs]:
    return [entry for output in outputs if output.request is request for entry in output.logprobs]
