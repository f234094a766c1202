"""The whole engine in one process, on the tiny random model: nothing that the scheduler does changes a token."""

from __future__ import annotations

import random
from typing import Any

import pytest

from common.errors import ConfigError, ContextLengthError, InvalidRequestError
from engine import LLM, SamplingParams
from engine.request import FinishReason

PROMPTS = ["a", "Hello there", "The quick brown fox " * 6, "0123456789" * 30, "émoji 🙂 and 漢字 " * 5, "z" * 90]
GREEDY = SamplingParams(max_tokens=20, temperature=0.0, ignore_eos=True)
SAMPLED = SamplingParams(
    max_tokens=20,
    temperature=1.1,
    top_k=40,
    top_p=0.95,
    presence_penalty=0.3,
    frequency_penalty=0.2,
    repetition_penalty=1.1,
    seed=11,
    ignore_eos=True,
)


def make(**settings: object) -> LLM:
    return LLM("dry-run", num_threads=1, **{"num_gpu_blocks": 256, **settings})


@pytest.fixture(scope="module")
def one_by_one() -> dict[SamplingParams, list[list[int]]]:
    """Every prompt alone, whole, without caches."""
    llm = make(prefix_cache=False, max_num_batched_tokens=2048)
    return {params: [llm.generate(p, params)[0].token_ids for p in PROMPTS] for params in (GREEDY, SAMPLED)}


@pytest.mark.parametrize("params", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"max_num_batched_tokens": 16, "max_num_seqs": 4},
        {"max_num_batched_tokens": 7, "max_num_seqs": 7, "block_size": 4, "num_gpu_blocks": 400},
        {"prefix_cache": False, "max_num_batched_tokens": 64, "max_num_seqs": 3},
        {"num_gpu_blocks": 32, "preemption": "recompute"},
        {"num_gpu_blocks": 32, "preemption": "recompute", "prefix_cache": False},
        {"num_gpu_blocks": 32, "preemption": "swap", "host_tier_gb": 0.01},
        {"num_gpu_blocks": 32, "preemption": "swap", "host_tier_gb": 0.01, "prefix_cache": False},
    ],
    ids=str,
)
def test_no_setting_changes_a_token(
    one_by_one: dict[SamplingParams, list[list[int]]], settings: dict[str, object], params: SamplingParams
) -> None:
    llm = make(**settings)
    for _ in range(2):  # the second time from the caches
        completions = llm.generate(PROMPTS, params)
        assert [c.token_ids for c in completions] == one_by_one[params]
    if settings.get("num_gpu_blocks") == 32:
        assert llm.engine.scheduler.num_preemptions > 0
    assert llm.engine.num_failed_steps == 0
    pool = llm.engine.scheduler.kv.pool
    pool.check_integrity()
    assert pool.num_used == 0


def test_requests_that_come_and_go_change_no_token() -> None:
    """Rows of a batch are vacated and taken again in every order."""
    rng = random.Random(5)
    prompts = [[rng.randrange(256) for _ in range(rng.randrange(1, 90))] for _ in range(60)]
    params = [SamplingParams(max_tokens=rng.randrange(1, 40), temperature=0.0, ignore_eos=True) for _ in prompts]
    alone = make(prefix_cache=False)
    expected = [alone.generate([p], q)[0].token_ids for p, q in zip(prompts, params, strict=True)]
    llm = make(max_num_seqs=16, max_num_batched_tokens=64)
    assert [c.token_ids for c in llm.generate(prompts, params)] == expected
    assert llm.engine.num_failed_steps == 0


def test_one_sequence_outgrows_the_others() -> None:
    """The first row of the batch moves to longer rows of its own and leaves a vacant place behind."""
    prompts = [[7] * 250, *([9, i] for i in range(15))]
    params = SamplingParams(max_tokens=24, temperature=0.0, ignore_eos=True)
    alone = make(prefix_cache=False)
    expected = [alone.generate([p], params)[0].token_ids for p in prompts]
    llm = make(max_num_seqs=16, max_num_batched_tokens=512)
    assert [c.token_ids for c in llm.generate(prompts, params)] == expected
    assert llm.engine.num_failed_steps == 0


def test_stream_gives_the_text_of_generate() -> None:
    llm = make()
    expected = llm.generate(PROMPTS[4], GREEDY)[0].text
    assert "".join(llm.stream(PROMPTS[4], GREEDY)) == expected


def test_a_closed_stream_frees_its_blocks() -> None:
    llm = make()
    stream = llm.stream("Hello", SamplingParams(max_tokens=500, ignore_eos=True))
    next(stream)
    stream.close()
    assert llm.engine.scheduler.kv.pool.num_used == 0
    assert not llm.engine.has_work()


def test_logprobs_do_not_depend_on_chunks() -> None:
    params = SamplingParams(max_tokens=5, temperature=0.0, logprobs=3, prompt_logprobs=2, ignore_eos=True)
    [whole] = make(max_num_batched_tokens=1024).generate(PROMPTS[3], params)
    [chunked] = make(max_num_batched_tokens=64).generate(PROMPTS[3], params)
    assert len(whole.logprobs) == 5
    assert len(whole.prompt_logprobs) == len(whole.prompt_token_ids) - 1
    assert [e.token_id for e in whole.prompt_logprobs] == whole.prompt_token_ids[1:]
    for a, b in zip(whole.logprobs + whole.prompt_logprobs, chunked.logprobs + chunked.prompt_logprobs, strict=True):
        assert (a.token_id, a.rank) == (b.token_id, b.rank)
        assert a.logprob == pytest.approx(b.logprob, abs=1e-4)


def test_a_bad_prompt_starts_nothing() -> None:
    llm = make()
    with pytest.raises(InvalidRequestError, match="vocabulary"):
        llm.generate([[1, 2], [99999]], GREEDY)
    for token_id in (-1, llm.engine.vocab_size):
        with pytest.raises(InvalidRequestError, match="vocabulary") as caught:
            llm.engine.add_request([1, 2], GREEDY, output_token_ids=[3, token_id])
        assert caught.value.param is None
    with pytest.raises(ContextLengthError):
        llm.generate(["ok", "x" * 5000], GREEDY)
    assert llm.engine.scheduler.num_requests == 0


def test_the_model_ends_at_its_own_token() -> None:
    llm = make()
    first = llm.generate("Hello", GREEDY)[0].token_ids
    [stopped] = llm.generate("Hello", SamplingParams(max_tokens=20, temperature=0.0, stop_token_ids=(first[3],)))
    assert stopped.token_ids == first[: first.index(first[3]) + 1]
    assert stopped.finish_reason == FinishReason.STOP.value


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"model": "/nowhere/at/all"}, "not found"),
        ({"device": "cuda"}, "cuda"),
        ({"max_num_seqs": 64, "max_num_batched_tokens": 8}, "max-num-batched-tokens"),
        ({"kv_cache_gb": -1.0}, "kv-cache-gb"),
    ],
)
def test_settings_that_cannot_work_say_so(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        LLM(**{"model": "dry-run", "num_threads": 1, **settings})
