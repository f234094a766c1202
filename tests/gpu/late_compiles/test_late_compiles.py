"""Kernels compiled after the warm-up are logged by name, and serving requests of any kind compiles none."""

from __future__ import annotations

import importlib
import logging
import pkgutil
import random
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import triton
from triton.runtime.jit import JITFunction

import kernels.gpu
from common.grammar import grammar
from common.model_files import resolve_model
from common.text.load import load_tokenizer
from engine.config import GpuConfig
from engine.engine import Engine
from engine.late_compiles.log import compiles_are_early, log_late_compiles
from engine.loader import load
from engine.request import SamplingParams
from kernels.gpu.launch import FastLaunch
from tests.gpu.kv.test_kv_groups import GEMMA3, GPT_OSS
from tests.gpu.mla.test_latents import V2
from tests.gpu.models import save_family
from tests.gpu.test_engine import open_gpu

VOCAB, MAX_TOKENS, MAX_LENGTH = 512, 4096, 2048
SIZES = {
    "vocab_size": VOCAB, "hidden_size": 256, "intermediate_size": 512, "head_dim": 64,
    "max_position_embeddings": 1 << 14,
}  # fmt: skip
EXPERTS = {"num_experts": 16, "num_experts_per_tok": 4, "moe_intermediate_size": 256, "norm_topk_prob": True}
FAMILIES: dict[str, dict[str, Any]] = {
    "dense": SIZES,
    "experts": {**SIZES, **EXPERTS, "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe"},
    "mla": {
        **V2, **SIZES, "head_dim": None, "kv_lora_rank": 64, "qk_nope_head_dim": 32, "v_head_dim": 32,
        "moe_intermediate_size": 128, "n_routed_experts": 8, "num_hidden_layers": 3,
    },
    "gemma": {**GEMMA3, **SIZES, "head_dim": 256, "sliding_window": 512},
    "gpt-oss": {**GPT_OSS, **SIZES, "intermediate_size": 256, "sliding_window": 128, "num_local_experts": 8},
}  # fmt: skip
PLAIN = SamplingParams(max_tokens=4, temperature=0.0, ignore_eos=True)
SCHEMA = grammar.json_schema({"type": "array", "items": {"type": "integer"}, "maxItems": 2})
KINDS = {
    "schema": replace(PLAIN, max_tokens=12, grammar=SCHEMA),
    "tool call": replace(PLAIN, max_tokens=12, grammar=grammar.regex("<call>[a-z]{1,9}</call>")),
    "penalties": replace(PLAIN, repetition_penalty=1.2, presence_penalty=0.3, frequency_penalty=0.2),
    "log-probabilities": replace(PLAIN, logprobs=3, prompt_logprobs=2),
    "bias": replace(PLAIN, logit_bias=((5, 2.0), (7, -1.0)), bad_words=((3,), (4, 5)), allowed_token_ids=()),
    "sampled": replace(PLAIN, temperature=0.8, top_k=20, top_p=0.9, min_p=0.02, seed=3),
    "plain": PLAIN,
}


@pytest.fixture
def hooks() -> Iterator[Any]:
    hooks = triton.knobs.runtime
    before = hooks.jit_cache_hook, hooks.jit_post_compile_hook
    yield hooks
    hooks.jit_cache_hook, hooks.jit_post_compile_hook = before


def test_a_kernel_that_is_compiled_late_is_named(hooks: Any, caplog: pytest.LogCaptureFixture) -> None:
    compiled = {
        "signature": {"x": "*bf16", "num_rows": "i32", "DIMS": "constexpr"},
        "constants": {(2,): 64},
        "configs": [{(0,): [["tt.divisibility", 16]]}],
    }
    asked = {
        "key": "k",
        "repr": "",
        "fn": SimpleNamespace(name="_rope"),
        "compile": compiled,
        "is_manual_warmup": False,
    }
    log_late_compiles()
    assert not hooks.jit_cache_hook(**asked, already_compiled=False)  # true would stop the compiler
    with caplog.at_level(logging.WARNING):
        hooks.jit_post_compile_hook(**asked, already_compiled=False)
        with compiles_are_early():
            assert hooks.jit_post_compile_hook is None
    assert "_rope(x: *bf16 / 16, num_rows: i32, DIMS = 64)" in caplog.text


@pytest.fixture
def nothing_is_compiled_yet(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Forget the kernels that earlier tests have compiled in this process; restore the hooks afterwards."""
    monkeypatch.setattr(load, "load_tokenizer", lambda _: load_tokenizer(resolve_model("dry-run")))
    for found in pkgutil.walk_packages(kernels.gpu.__path__, "kernels.gpu."):
        for value in vars(importlib.import_module(found.name)).values():
            if isinstance(value, FastLaunch):
                value._variants.clear()
                value = value.kernel
            if isinstance(value, JITFunction):
                value.device_caches.clear()
    hooks = triton.knobs.runtime
    before = hooks.jit_cache_hook, hooks.jit_post_compile_hook
    hooks.jit_cache_hook = hooks.jit_post_compile_hook = None  # of an earlier engine, which would log the warm-up
    yield
    hooks.jit_cache_hook, hooks.jit_post_compile_hook = before


def prompt(draw: random.Random, length: int) -> list[int]:
    return [draw.randrange(VOCAB) for _ in range(length)]


def serve(made: Engine, prompts: Sequence[list[int]], params: SamplingParams = PLAIN) -> None:
    for each in prompts:
        made.add_request(each, params)
    while made.has_work():
        assert not any(output.error for output in made.step().outputs)


def serve_everything(made: Engine) -> None:
    """Serve requests of each kind alone and together, few and many, short and long, next to decode rows."""
    draw = random.Random(1)
    for params in KINDS.values():
        serve(made, [prompt(draw, 40)], params)
        serve(made, [prompt(draw, 300), prompt(draw, 1500)], params)
    serve(made, [prompt(draw, 64)] * 4, KINDS["sampled"])  # n = 4, of a cached prefix
    shared = prompt(draw, 1200)
    for length in (10, 300, 700):
        serve(made, [shared + prompt(draw, length)])
    for count, length in ((64, 256), (8, 1024), (3, 2000), (64, 20), (1, 1), (1, 1100)):
        serve(made, [prompt(draw, length) for _ in range(count)])
    for index in range(24):
        made.add_request(prompt(draw, 30), replace(PLAIN, max_tokens=60))
        if index % 2:
            made.add_request(prompt(draw, int(2 ** draw.uniform(0, 10.9))), draw.choice(list(KINDS.values())))
        for _ in range(2):
            made.step()
    serve(made, [])


@pytest.mark.skipif(not torch.cuda.is_available(), reason="compiles nothing without a GPU")
@pytest.mark.usefixtures("nothing_is_compiled_yet")
@pytest.mark.parametrize(
    ("family", "settings"),
    [
        *((family, {}) for family in FAMILIES),
        ("dense", {"quant_mode": "fp8", "kv_cache_dtype": "fp8"}), ("experts", {"quant_mode": "fp8"}),
        ("dense", {"num_speculative_tokens": 3}),
        ("gemma", {"num_gpu_blocks": 400, "preemption": "swap", "host_tier_gb": 0.1}),
    ],
)  # fmt: skip
def test_no_request_waits_for_a_compiler(
    family: str, settings: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    model = save_family(tmp_path, FAMILIES[family])
    made, _ = open_gpu(
        model, monkeypatch, GpuConfig(), "bfloat16",
        **{
            "num_gpu_blocks": 2000, "max_num_seqs": 64, "max_num_batched_tokens": MAX_TOKENS,
            "max_model_len": MAX_LENGTH, **settings,
        },
    )  # fmt: skip
    with caplog.at_level(logging.WARNING):
        serve_everything(made)
    late = [record.message for record in caplog.records if record.name == "engine.late_compiles.log"]
    assert not late, "\n".join(late)
