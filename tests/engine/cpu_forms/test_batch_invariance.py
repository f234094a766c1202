"""Batch invariance on a CPU: tokens and log-probabilities have the same bits in any batch."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from common.wings import has_wing
from engine.assembly import assemble
from engine.config import EngineConfig
from engine.cpu_forms import forms
from engine.cpu_forms.forms import invariant
from engine.cpu_gemms.gemms import dense_linear
from engine.engine import Engine
from engine.layers.linear import Linear
from engine.request import Request, SamplingParams
from tests.engine.driving import finish, random_prompt
from tests.engine.tiny_models import SHAPE, TINY_MODELS, VOCAB_SIZE, with_wing

# GEMM libraries treat matrices of a few thousand numbers differently; no real model has such.
LARGER = {
    "hidden_size": 384,
    "num_hidden_layers": 2,
    "num_experts": 32,
    "n_routed_experts": 32,
    "num_local_experts": 32,
}
NUM_LOGPROBS = 2 if has_wing("engine.logprobs") else None  # otherwise only tokens are compared
PARAMS = SamplingParams(max_tokens=4, temperature=0.0, logprobs=NUM_LOGPROBS, ignore_eos=True, seed=0)
LENGTHS = (1, 5, 17, 40, 64, 90, 3, 33, 12)  # more prompts than MAX_INT4_ROWS
Answers = list[tuple[list[int], str]]


def answers(engine: Engine, prompts: list[list[int]], arrivals: random.Random | None = None) -> Answers:
    """Return each prompt's tokens and log-probabilities; prompts run one by one, or arrive at random steps."""
    requests: dict[int, Request] = {}
    logprobs: dict[str, list[Any]] = {}
    waiting = list(range(len(prompts)))
    if arrivals is not None:
        arrivals.shuffle(waiting)
    while waiting or engine.has_work():
        if waiting and (not engine.has_work() or (arrivals is not None and arrivals.random() < 0.6)):
            index = waiting.pop()
            requests[index] = engine.add_request(prompts[index], PARAMS)
        for output in engine.step().outputs:
            logprobs.setdefault(output.request.request_id, []).extend(output.logprobs)
    return [
        (list(requests[index].output_token_ids), repr(logprobs[requests[index].request_id]))
        for index in range(len(prompts))
    ]


def save(family: str, path: Path) -> Path:
    tiny = TINY_MODELS[family]
    larger = {name: value for name, value in LARGER.items() if name in {**SHAPE, **tiny.changes}}
    return replace(tiny, changes={**tiny.changes, **larger}).save(path)


def open_engine(path: Path, **settings: Any) -> Engine:
    config = EngineConfig(
        model=str(path), device="cpu", dtype="bfloat16", block_size=8, max_num_batched_tokens=48, max_num_seqs=16,
        num_gpu_blocks=256, prefix_cache=False, num_threads=1, **settings,
    )  # fmt: skip
    return assemble(config).engine


@pytest.mark.parametrize(
    ("family", "quant_mode"),
    [
        *(
            pytest.param(*with_wing(family).values, "none", marks=with_wing(family).marks)
            for family in ("llama", "qwen2", "qwen3", "qwen3-moe", "deepseek-v2-lite", "gemma3", "gpt-oss")
        ),
        *(  # one family for each kind of layer that is quantized
            pytest.param(
                *with_wing(family).values,
                mode,
                marks=[*with_wing(family).marks, pytest.mark.wing("engine.quantization")],
            )
            for family in ("qwen2", "qwen3-moe", "deepseek-v2-lite")
            for mode in ("int8-weight", "int4-weight")
        ),
    ],
)
def test_company_changes_nothing(family: str, quant_mode: str, tmp_path: Path) -> None:
    engine = open_engine(save(family, tmp_path), quant_mode=quant_mode)
    prompts = [random_prompt(length, VOCAB_SIZE, length) for length in LENGTHS]
    alone = answers(engine, prompts)
    assert answers(engine, prompts, random.Random(0)) == alone


@pytest.mark.parametrize(
    "family", map(with_wing, ["llama", "qwen2", "qwen3-moe", "deepseek-v2-lite", "gemma3", "gpt-oss"])
)
def test_generated_tokens_that_are_computed_again_change_nothing(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are computed again after a preemption, or on another worker after the first one died."""
    monkeypatch.setattr(forms, "MAX_REPLAY_TOKENS", 4)
    quant_mode = "int8-weight" if has_wing("engine.quantization") else "none"
    engine = open_engine(save(family, tmp_path), quant_mode=quant_mode)
    prompts = [random_prompt(length, VOCAB_SIZE, length) for length in (5, 70)]
    params = replace(PARAMS, max_tokens=12)
    first = [resumed(engine, prompt, [], params) for prompt in prompts]
    for num_known in (1, 7, 11):
        for prompt, (token_ids, logprobs) in zip(prompts, first, strict=True):
            again = resumed(engine, prompt, token_ids[:num_known], params)
            assert again == (token_ids, logprobs[num_known:])


def resumed(
    engine: Engine, prompt: list[int], known: list[int], params: SamplingParams
) -> tuple[list[int], list[str]]:
    """Return all tokens, and the log-probabilities of those after the known ones."""
    request = engine.add_request(prompt, params, output_token_ids=known)
    return request.output_token_ids, [repr(entry) for output in finish(engine) for entry in output.logprobs]


@pytest.mark.wing("engine.speculation")
def test_drafts_change_nothing(tmp_path: Path) -> None:
    path = save("llama", tmp_path)
    prompts = [random_prompt(4, VOCAB_SIZE, length) * (1 + length // 4) for length in LENGTHS]
    alone = answers(open_engine(path), prompts)
    engine = open_engine(path, num_speculative_tokens=3, adaptive_drafts=False)
    assert answers(engine, prompts, random.Random(0)) == alone


@pytest.mark.wing("engine.native")  # whose attention of chunks does so, and plain torch's does not
def test_without_it_company_changes_bits(tmp_path: Path) -> None:
    """The control: without batch invariance, the values that the tests above compare do differ."""
    engine = open_engine(save("llama", tmp_path), batch_invariant=False)
    prompts = [random_prompt(length, VOCAB_SIZE, length) for length in LENGTHS]
    assert answers(engine, prompts, random.Random(0)) != answers(engine, prompts)


@pytest.mark.parametrize("make", [Linear, dense_linear])
def test_a_single_row_of_many_columns(make: Any) -> None:
    torch.manual_seed(0)
    layer = invariant(make((torch.randn(256, 6144) / 80).bfloat16(), None))
    x = torch.randn(9, 6144).bfloat16()
    together = layer(x)
    for row in range(9):
        torch.testing.assert_close(layer(x[row : row + 1]), together[row : row + 1], atol=0, rtol=0)


def test_no_rows() -> None:
    """If ranks divide tokens, a rank may have none."""
    layer = invariant(Linear(torch.randn(8, 4).bfloat16()))
    assert layer(torch.zeros(0, 4, dtype=torch.bfloat16)).shape == (0, 8)
