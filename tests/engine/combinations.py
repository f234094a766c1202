"""Models of all kinds, and one run with everything that requests may ask for, which combination tests compare."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from common.grammar import grammar
from engine.assembly import EngineParts, assemble
from engine.config import EngineConfig
from engine.request import Request, RequestOutput, SamplingParams, TokenLogprobs
from tests.engine.driving import finish, num_drafts, random_prompt
from tests.engine.gguf.gguf_files import write_wide
from tests.engine.quantization.packed_files import FORMATS, write
from tests.engine.speculation.drafters import MakeOracle, draft_with, knows
from tests.engine.tiny_models import TINY_MODELS, VOCAB_SIZE
from tests.harness.waiting import wait_until

WORDS = "([a-f]{3} )"
PLAIN = SamplingParams(max_tokens=16, temperature=0.0, ignore_eos=True, prompt_logprobs=1)
PARAMS = [replace(PLAIN, grammar=grammar.regex(WORDS + "{20}")), PLAIN, PLAIN, PLAIN]
PROMPTS = [random_prompt(length, VOCAB_SIZE, length) for length in (13, 17, 22, 30)]
LONG = [(5 * i) % 200 for i in range(40)]
POOLED = SamplingParams(max_tokens=1, temperature=0.0)
FLOAT32: dict[str, Any] = {"dtype": "float32", "quant_mode": "none"}
SMALL_STEPS: dict[str, Any] = {"max_num_batched_tokens": 24, "max_num_seqs": 4, "block_size": 4}
SWAP: dict[str, Any] = {"preemption": "swap", "host_tier_gb": 0.01}


def save_packed(folder: Path) -> Path:
    write(FORMATS["gptq"], folder)
    return folder


def save_gguf(folder: Path) -> Path:
    return write_wide(folder, "Q4_1", num_hidden_layers=2).path


# The function that writes a model, its settings, and a number of blocks for the longest sequence, but not two.
MODELS: dict[str, tuple[Callable[[Path], Path], dict[str, Any], int]] = {
    "windows and experts": (TINY_MODELS["gpt-oss"].save, FLOAT32, 24),
    "latents and experts": (TINY_MODELS["deepseek-v3"].save, FLOAT32, 13),
    "packed": (save_packed, {}, 13),
    "packed, as int8": (save_packed, {"quant_mode": "int8-weight"}, 13),
    "gguf": (save_gguf, {}, 13),
}


def open_engine(path: Path, **settings: Any) -> EngineParts:
    base = {"device": "cpu", "num_threads": 1, "num_gpu_blocks": 400, **SMALL_STEPS}
    return assemble(EngineConfig(str(path), **{**base, **settings}))


@dataclass(frozen=True)
class Answers:
    """Tokens of PROMPTS and LONG, logprobs of the prompts' tokens, and vectors of LONG."""

    tokens: list[list[int]]
    logprobs: list[list[TokenLogprobs]]
    vectors: list[Tensor]

    def check(self, parts: EngineParts, near: float = 1e-3, is_swapped: bool = False) -> None:
        """Check that an engine with drafts and other features gives these. near: tolerated errors of vectors."""
        found = run(parts)
        assert found.tokens == self.tokens
        for ours, theirs in zip(found.logprobs, self.logprobs, strict=True):
            assert [entry.token_id for entry in ours] == [entry.token_id for entry in theirs]
            wanted = [entry.logprob for entry in theirs]
            assert [entry.logprob for entry in ours] == pytest.approx(wanted, abs=1e-2)
        for one, other in zip(found.vectors, self.vectors, strict=True):
            torch.testing.assert_close(one, other, rtol=near, atol=near)
        drafted, accepted = num_drafts(parts.engine)
        assert 0 < accepted < drafted
        if is_swapped:
            assert parts.engine.load().num_preemptions > 0

    def draft(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Make about two of three drafts right from now on."""
        known = [prompt + each for prompt, each in zip([*PROMPTS, LONG], self.tokens, strict=True)]
        draft_with(monkeypatch, MakeOracle(knows(known), 0.7, VOCAB_SIZE))


def run(parts: EngineParts) -> Answers:
    """Embed a long prompt, which more urgent requests interrupt; the first of these follows a grammar."""
    engine = parts.engine
    pooled = [engine.add_request(LONG, replace(POOLED, pooling=each), priority=1) for each in ("last", "mean")]
    engine.step()
    others = [engine.add_request(prompt, params) for prompt, params in zip(PROMPTS, PARAMS, strict=True)]
    wait_until(lambda: not others[0].is_held)  # or the others might have ended before the first one's row
    outputs = finish(engine)
    assert re.fullmatch(WORDS + "{4}", bytes(others[0].output_token_ids).decode())
    return Answers(
        [request.output_token_ids for request in (*others, pooled[0])],
        [[entry for output in of(outputs, request) for entry in output.prompt_logprobs] for request in others],
        [torch.tensor(output.logprobs[0].top_logprobs) for request in pooled for output in of(outputs, request)],
    )


def of(outputs: Sequence[RequestOutput], request: Request) -> list[RequestOutput]:
    return [output for output in outputs if output.request is request]
