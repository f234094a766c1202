"""POST /v1/completions through the official client, against scripted workers."""

from __future__ import annotations

from typing import Any

import pytest

from protos import types_pb2 as pb
from router.api.text import ChoiceResult
from router.completions_api.renderer import best_results
from tests.harness.router import DRY_RUN, Cluster, cluster, text_of
from tests.harness.scripted_worker import Script

pytestmark = pytest.mark.asyncio(loop_scope="module")


async def test_echo_alone_scores_a_prompt() -> None:
    """max_tokens 0, as evaluation harnesses ask: the prompt's logprobs, and nothing that was generated."""
    for num_prefill in (0, 1):
        async with cluster(num_prefill=num_prefill, local_prefill_tokens=0) as c:
            fields: dict[str, Any] = {"echo": True, "max_tokens": 0, "logprobs": 1}
            answer = (await c.complete(["abc", "de"], **fields)).json()
            one_token = (await c.complete(["abc", "de"], **{**fields, "max_tokens": 1})).json()
            assert [choice["text"] for choice in answer["choices"]] == ["abc", "de"]
            assert [choice["finish_reason"] for choice in answer["choices"]] == ["length"] * 2
            for choice, longer in zip(answer["choices"], one_token["choices"], strict=True):
                for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset"):
                    assert choice["logprobs"][name] == longer["logprobs"][name][:-1]
            assert (answer["usage"]["prompt_tokens"], answer["usage"]["completion_tokens"]) == (5, 0)
            events = await c.events("/v1/completions", prompt="abc", **fields)
            assert text_of(events) == "abc"
            assert events[-2]["choices"][0]["finish_reason"] == "length"
            assert (await c.complete("abc", echo=True, max_tokens=0)).json()["choices"][0]["text"] == "abc"
            await c.until(c.is_quiet)


async def test_completions_echo_with_logprobs(c: Cluster) -> None:
    answer = await c.openai.completions.create(
        model="dry-run", prompt="abc", max_tokens=2, echo=True, logprobs=1, seed=1, n=2
    )
    for choice in answer.choices:
        assert choice.text.startswith("abc")
        assert choice.logprobs is not None
        assert choice.logprobs.tokens is not None
        assert "".join(choice.logprobs.tokens) == choice.text
        assert choice.logprobs.token_logprobs is not None
        assert choice.logprobs.token_logprobs[0] is None
        assert choice.logprobs.text_offset == [0, 1, 2, 3, 4]
    single = (await c.complete("a", max_tokens=1, echo=True, logprobs=0)).json()["choices"][0]
    assert single["logprobs"]["tokens"] == list(single["text"])
    events = await c.events("/v1/completions", prompt="abc", max_tokens=2, echo=True, logprobs=1)
    assert text_of(events) == answer.choices[0].text


async def test_completions_of_several_prompts_and_of_token_ids(c: Cluster) -> None:
    one = (await c.complete(list(b"abc"), return_token_ids=True)).json()
    assert one["choices"][0]["text"] == (await c.complete("abc")).json()["choices"][0]["text"]
    assert one["choices"][0]["prompt_token_ids"] == list(b"abc")
    assert bytes(one["choices"][0]["token_ids"]).decode() == one["choices"][0]["text"]
    many = (await c.complete(["abc", "xyz"], n=2)).json()
    assert [choice["index"] for choice in many["choices"]] == [0, 1, 2, 3]
    assert many["choices"][0]["text"] == one["choices"][0]["text"]
    assert many["usage"]["prompt_tokens"] == 6


async def test_best_of_returns_the_best_mean_logprob(c: Cluster) -> None:
    four = (await c.complete(n=4, logprobs=0)).json()["choices"]
    means = [sum(item["logprobs"]["token_logprobs"]) / 8 for item in four]
    best = (await c.complete(best_of=4, n=1)).json()
    assert best["choices"][0]["text"] == four[means.index(max(means))]["text"]
    assert best["choices"][0]["logprobs"] is None
    assert best["usage"]["completion_tokens"] == 32


async def test_log_probabilities_may_name_token_ids() -> None:
    async with cluster(script=Script(reply=list(b"abc"))) as c:
        asked: dict[str, Any] = {"return_tokens_as_token_ids": True, "max_tokens": 3}
        [choice] = (await c.complete("xy", logprobs=1, echo=True, **asked)).json()["choices"]
        assert choice["logprobs"]["tokens"] == [f"token_id:{token}" for token in b"xyabc"]
        assert choice["logprobs"]["text_offset"] == [0, 1, 2, 3, 4]
        assert choice["text"] == "xyabc"
        plain = (await c.complete("xy", logprobs=1, max_tokens=3)).json()["choices"][0]["logprobs"]
        assert plain["tokens"] == ["a", "b", "c"]


async def test_offsets_count_characters_of_the_text_streamed_or_not() -> None:
    """Several tokens of one character have its offset, and a special token that is skipped adds nothing."""
    reply = [*"é😀".encode(), DRY_RUN.bos_id, *b"xy"]
    async with cluster(script=Script(reply=reply)) as c:
        asked: dict[str, Any] = {"logprobs": 0, "ignore_eos": True, "max_tokens": len(reply)}
        [choice] = (await c.complete("ü", echo=True, **asked)).json()["choices"]
        assert choice["text"] == "üé😀xy"
        assert choice["logprobs"]["text_offset"] == [0, 0, 1, 1, 2, 2, 2, 2, 3, 3, 4]
        for echo in (False, True):
            [choice] = (await c.complete("ü", echo=echo, **asked)).json()["choices"]
            events = await c.events("/v1/completions", prompt="ü", echo=echo, **asked)
            parts = [event["choices"][0]["logprobs"] for event in events[:-1]]
            assert [offset for part in parts for offset in part["text_offset"]] == choice["logprobs"]["text_offset"]


async def test_best_of_picks_per_prompt_and_numbers_anew() -> None:
    logprobs = (-3, -1, -1, -2)
    results = [ChoiceResult(index, logprobs=[pb.TokenLogprobs(logprob=p)]) for index, p in enumerate(logprobs)]
    best = best_results(results, 2, 1)
    assert [(item.index, prompt, item.logprobs[0].logprob) for prompt, item in best] == [(0, 0, -1), (1, 1, -1)]


async def test_a_choice_whose_time_was_over_before_its_first_token_is_not_the_best() -> None:
    results = [ChoiceResult(0), ChoiceResult(1, logprobs=[pb.TokenLogprobs(logprob=-5)])]
    ((_, best),) = best_results(results, 2, 1)
    assert best.logprobs
