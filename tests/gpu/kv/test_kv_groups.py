"""Models with KV groups on the GPU engine against the plain float32 engine: Gemma-3, gpt-oss, and dense layers."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from engine.config import GpuConfig
from engine.engine import Engine
from engine.request import SamplingParams, TokenLogprobs
from tests.engine.driving import num_drafts
from tests.engine.speculation.drafters import MakeOracle, draft_with, knows
from tests.gpu.models import save_family, use_small_tiles
from tests.gpu.prompt_graphs.test_prompt_graphs import open_with_graphs
from tests.gpu.test_engine import PROMPTS, assert_same_logprobs, generate, logprobs_of, open_gpu, reference

WINDOW, BLOCK_SIZE = 9, 4
SLIDING, FULL = "sliding_attention", "full_attention"
GEMMA3 = {
    "architectures": ["Gemma3ForCausalLM"], "model_type": "gemma3_text", "num_hidden_layers": 3, "head_dim": 32,
    "sliding_window": WINDOW, "layer_types": [SLIDING, SLIDING, FULL], "hidden_activation": "gelu_pytorch_tanh",
    "query_pre_attn_scalar": 24, "tie_word_embeddings": False,
    "rope_parameters": {
        FULL: {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
        SLIDING: {"rope_type": "default", "rope_theta": 5000.0},
    },
}  # fmt: skip
GPT_OSS = {
    "architectures": ["GptOssForCausalLM"], "model_type": "gpt_oss", "sliding_window": WINDOW,
    "layer_types": [SLIDING, FULL], "attention_bias": True, "num_local_experts": 4, "num_experts_per_tok": 2,
    "intermediate_size": 32, "swiglu_limit": 0.5, "tie_word_embeddings": False,
}  # fmt: skip
DENSE = {
    "use_sliding_window": True,
    "sliding_window": WINDOW,
    "layer_types": [FULL, SLIDING],
    "tie_word_embeddings": False,
}
SAMPLED = [SamplingParams(max_tokens=6, temperature=2.0, seed=seed, ignore_eos=True) for seed in range(4)]


def check(made: Engine, expected: list[list[TokenLogprobs]], prompts: Sequence[list[int]] = PROMPTS) -> None:
    for ours, theirs in zip(logprobs_of(made, prompts), expected, strict=True):
        assert_same_logprobs(ours, theirs)
    made.kv.pool.check_integrity()
    assert made.kv.pool.num_used == 0
    assert made.num_failed_steps == 0


def test_gemma3_in_chunks_and_over_cached_prefixes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """There are fewer blocks than the longest sequence would need if none were freed before the windows."""
    model = save_family(tmp_path, GEMMA3)
    plain, longest = reference(model), max(PROMPTS, key=len)  # before the other engine, whose runner takes its place
    made, _ = open_gpu(
        model, monkeypatch, GpuConfig(), num_gpu_blocks=3 * 10 - 2, block_size=BLOCK_SIZE, max_model_len=40,
        max_num_batched_tokens=16,
    )  # fmt: skip
    check(made, logprobs_of(plain, PROMPTS[:2]), PROMPTS[:2])
    expected = generate(plain, SAMPLED, [longest])
    for num_hits in (0, 32):
        assert generate(made, SAMPLED, [longest]) == expected
        assert made.kv.stats.hit_tokens == num_hits


def test_gpt_oss_swapped_to_the_host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    use_small_tiles(monkeypatch, 2)
    model = save_family(tmp_path, GPT_OSS)
    plain = reference(model)
    made, _ = open_gpu(
        model, monkeypatch, GpuConfig(), num_gpu_blocks=20, block_size=BLOCK_SIZE, max_model_len=40,
        max_num_batched_tokens=16, preemption="swap", host_tier_gb=0.01,
    )  # fmt: skip
    check(made, logprobs_of(plain))
    assert made.load().num_preemptions > 0


def test_prompts_as_graphs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = save_family(tmp_path, DENSE)
    plain = reference(model)
    settings = {"block_size": BLOCK_SIZE, "max_num_batched_tokens": 16}
    made, _, buckets = open_with_graphs(model, monkeypatch, **settings)
    longest = sorted(PROMPTS, key=len)[1:]
    check(made, logprobs_of(plain, longest), longest)
    assert buckets


def test_drafts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = save_family(tmp_path, DENSE)
    plain = reference(model)
    expected = generate(plain, SAMPLED)
    answers = [prompt + tokens for prompt, tokens in zip(PROMPTS, expected, strict=True)]
    make_drafter = MakeOracle(knows(answers), 0.6, 97)
    draft_with(monkeypatch, make_drafter, on_gpu=True)
    made, _ = open_gpu(
        model, monkeypatch, GpuConfig(), block_size=BLOCK_SIZE, num_speculative_tokens=3, max_num_seqs=16
    )  # fmt: skip
    assert generate(made, SAMPLED) == expected
    drafted, accepted = num_drafts(made)
    assert 0 < accepted < drafted


def test_a_prompt_goes_on_over_the_live_blocks_of_another_engine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in workers, the blocks of a lease are copied to the blocks that `schedule` has allocated."""
    model, prompt = save_family(tmp_path, DENSE), max(PROMPTS, key=len)
    [expected] = generate(reference(model), SAMPLED[:1], [prompt])
    settings: dict[str, Any] = {"block_size": BLOCK_SIZE, "max_num_batched_tokens": 16}
    prefill, sender = open_gpu(model, monkeypatch, GpuConfig(), **settings)
    decode, receiver = open_gpu(model, monkeypatch, GpuConfig(), **settings)
    sent = prefill.add_request(prompt, SAMPLED[0], prefill_only=True)
    while prefill.has_work():
        prefill.step()
    leased = prefill.kv.detach(sent, sent.num_known_tokens - 1)
    assert len(leased) == 9 + 3  # of 2 x 9
    request = decode.add_request(
        prompt, SAMPLED[0], output_token_ids=sent.output_token_ids, kv_source="lease", num_source_tokens=len(prompt)
    )
    [job] = decode.step().loads
    receiver._pool[job.block_ids] = sender._pool[[leased[position] for position in job.positions]]
    decode.finish_load(job, True)
    while decode.has_work():
        decode.step()
    assert request.output_token_ids == expected
    assert decode.num_failed_steps == 0
