"""Ranks of a model: the tokens of one rank, for every family; processes that start, follow and end as they should."""

from __future__ import annotations

import queue
from dataclasses import replace
from pathlib import Path

import pytest

import engine.tensor_parallel.assembly
from common.errors import ConfigError
from engine.assembly import assemble
from engine.config import EngineConfig
from mini_infer import LLM
from tests.engine.conftest import Greedy
from tests.engine.driving import prompt_logprobs
from tests.engine.quantization.packed_files import TINY
from tests.engine.threaded_ranks import (
    GREEDY,
    NUM_TOKENS,
    OF_RANKS,
    PROMPTS,
    SCARCE_BLOCKS,
    answers_of,
    open_ranks,
    own_followers,
    place_experts,
)
from tests.engine.tiny_models import TINY_MODELS, UNLIKE_WHEN_DIVIDED

pytestmark = pytest.mark.slow


@pytest.mark.parametrize(
    ("name", "form"),
    [*((name, "absorbed") for name in UNLIKE_WHEN_DIVIDED), ("deepseek-v2-lite", "latent"), ("deepseek-v3", "naive")],
)
def test_two_ranks_of_every_family_equal_transformers(
    name: str, form: str, greedy: Greedy, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With an odd vocabulary, which is padded, cached prefixes, chunks, and swaps."""
    path, expected = greedy(TINY_MODELS[name], PROMPTS, NUM_TOKENS)
    parts = open_ranks(
        path, 2, monkeypatch, num_gpu_blocks=SCARCE_BLOCKS.get(name, 24), block_size=4, max_num_batched_tokens=24,
        max_num_seqs=6, preemption="swap", host_tier_gb=0.01, mla=form,
    )  # fmt: skip
    for _ in range(2):
        assert answers_of(parts) == expected
    assert parts.engine.load().num_preemptions > 0
    assert parts.engine.num_failed_steps == 0


@pytest.mark.parametrize(
    ("name", "num_ranks", "exchange"),
    [
        ("qwen3-moe", 2, "sum"),
        ("qwen3-moe-some-dense", 2, "dispatch"),
        ("gpt-oss", 2, "dispatch"),
        ("qwen2-moe", 2, "dispatch"),
        ("qwen3-moe", 4, "dispatch"),
        ("deepseek-v2-lite", 2, "sum"),
        ("deepseek-v3", 4, "dispatch"),
    ],
)
def test_ranks_of_whole_experts_equal_transformers(
    name: str, num_ranks: int, exchange: str, greedy: Greedy, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Steps mix prompts and decode rows, or have fewer rows than ranks."""
    tiny = TINY_MODELS[name]
    if num_ranks == 4:
        heads = {"num_attention_heads": 8, "num_key_value_heads": 8 if "deepseek" in name else 2}
        tiny = replace(tiny, changes={**tiny.changes, **heads, "num_experts": 8, "n_routed_experts": 8})
    path, expected = greedy(tiny, PROMPTS, NUM_TOKENS)
    monkeypatch.setitem(OF_RANKS, "expert_parallel", True)
    monkeypatch.setitem(OF_RANKS, "expert_exchange", exchange)
    parts = open_ranks(path, num_ranks, monkeypatch, max_num_batched_tokens=24)
    assert answers_of(parts, replace(GREEDY, prompt_logprobs=0)) == expected
    assert parts.engine.num_failed_steps == 0


def test_ranks_of_placed_experts_equal_transformers(
    tmp_path: Path, greedy: Greedy, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two experts are redundant, and ranks add up their outputs."""
    path, expected = greedy(TINY_MODELS["qwen3-moe"], PROMPTS, NUM_TOKENS)
    place_experts(monkeypatch, tmp_path / "loads.json", [[90, 1, 40, 5, 5, 9]] * 3, exchange="sum")
    assert answers_of(open_ranks(path, 2, monkeypatch, max_num_batched_tokens=24)) == expected


@pytest.mark.parametrize("name", ["llama", "qwen2", "qwen3"])
def test_ranks_of_8_bit_kv_scale_their_heads_as_one_rank_does(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = TINY_MODELS[name].save(tmp_path)
    found = []
    for num_ranks in (1, 2):
        found.append(answers_of(open_ranks(path, num_ranks, monkeypatch, kv_cache_dtype="fp8")))
    assert found[0] == found[1]


@pytest.mark.parametrize("quant_mode", ["int8-weight", "int4-weight"])
def test_ranks_quantize_their_shards(quant_mode: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each quantizes its own, so scales of divided inputs are finer than one rank's: close, not equal."""
    path = TINY.save(tmp_path)  # whose columns fill groups of int4
    found = []
    for num_ranks in (1, 2):
        parts = open_ranks(path, num_ranks, monkeypatch, quant_mode=quant_mode, dtype="bfloat16")
        assert parts.loaded.quant_mode == quant_mode
        found.append(prompt_logprobs(parts.engine, PROMPTS))
    assert 0 < float((found[0] - found[1]).abs().max()) < 0.2


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"tp": 3}, "3 ranks cannot divide 4 query heads"),
        ({"tp": 2, "expert_parallel": True}, "2 ranks cannot divide no experts"),
        ({"tp": 0}, "choose 1 to 256"),
        ({"pp": 3}, "--pp 3: the model has 2 layers"),
        ({"pp": 0}, "choose 1 to 64"),
    ],
    ids=str,
)
def test_a_model_that_ranks_cannot_divide_is_refused_before_any_starts(
    monkeypatch: pytest.MonkeyPatch, settings: dict[str, float], told: str
) -> None:
    monkeypatch.setattr(
        engine.tensor_parallel.assembly, "FollowedRanks", lambda *_: pytest.fail("ranks were started")
    )
    with pytest.raises(ConfigError, match=told):
        assemble(EngineConfig("dry-run", device="cpu", num_gpu_blocks=64, **settings))  # type: ignore[arg-type]


@pytest.mark.usefixtures("forked_followers")
def test_ranks_that_end_with_their_engine_are_not_lost() -> None:
    llm = LLM("dry-run", tp=2, num_gpu_blocks=64)
    assert len(own_followers()) == 1
    lost: queue.Queue[str] = queue.Queue()
    llm.engine._runner.watch_ranks(lost.put)  # type: ignore[attr-defined]
    del llm
    assert own_followers() == []
    with pytest.raises(queue.Empty):
        lost.get(timeout=0.3)
