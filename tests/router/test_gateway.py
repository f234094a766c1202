"""The HTTP surface through the official client, against scripted workers."""

from __future__ import annotations

from typing import Any

import openai
import pytest

from common.metrics import ROUTER_SPECS, START_TIME
from common.token_ids import num_ids, unpack_ids
from tests.harness.router import DRY_RUN, TWO_CHOICES, Cluster, cluster, text_of
from tests.harness.scripted_worker import Script

pytestmark = pytest.mark.asyncio(loop_scope="module")
MESSAGES: Any = [{"role": "user", "content": "Hello"}]


@pytest.mark.wing("router.several_choices")
async def test_n_choices_differ_and_start_after_the_first(c: Cluster) -> None:
    answer = await c.openai.chat.completions.create(model="dry-run", messages=MESSAGES, max_tokens=8, n=3, seed=5)
    texts = [choice.message.content for choice in answer.choices]
    assert len(set(texts)) == 3
    assert [choice.index for choice in answer.choices] == [0, 1, 2]
    assert [submit.sampling.seed for submit in c.decode[0].submits] == [5, 6, 7]
    again = await c.openai.chat.completions.create(model="dry-run", messages=MESSAGES, max_tokens=8, seed=6)
    assert again.choices[0].message.content == texts[1]
    assert answer.usage is not None
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (8, 24)
    events = await c.events(n=3, seed=5)
    assert [text_of(events, index) for index in range(3)] == texts
    assert events[-1] == "[DONE]"
    assert events.count("[DONE]") == 1


async def test_seed_is_drawn_when_absent_and_negative_seeds_are_accepted(c: Cluster) -> None:
    texts = set()
    for _ in range(3):
        answer = await c.openai.chat.completions.create(model="dry-run", messages=MESSAGES, max_tokens=8)
        texts.add(answer.choices[0].message.content)
    assert len(texts) == 3
    assert (await c.chat(seed=-5)).status_code == 200
    assert c.decode[0].submits[-1].sampling.seed == (1 << 64) - 5


@pytest.mark.wing("router.stop_strings")
@pytest.mark.parametrize("include", [False, True])
async def test_stop_string_across_tokens(include: bool) -> None:
    async with cluster(script=Script(reply=list(b"one two three four"))) as c:
        fields: dict[str, Any] = {"stop": ["thr", "xyz"], "max_tokens": 50, "include_stop_str_in_output": include}
        answer = (await c.chat(**fields)).json()
        expected = "one two thr" if include else "one two "
        assert answer["choices"][0]["message"]["content"] == expected
        assert answer["choices"][0]["finish_reason"] == "stop"
        assert answer["choices"][0]["stop_reason"] == "thr"
        assert answer["usage"]["completion_tokens"] == 11
        assert text_of(await c.events(**fields)) == expected
        await c.until(lambda: len(c.decode[0].cancels) == 2)  # the worker is told to stop
        await c.until(c.is_quiet)


@pytest.mark.wing("router.stop_strings")
async def test_stop_in_the_last_token_and_text_held_back_until_the_end() -> None:
    async with cluster(script=Script(reply=list(b"abcde"))) as c:
        assert (await c.chat(stop="de")).json()["choices"][0]["message"]["content"] == "abc"
        # "e!" never comes: the text held back for it must come with the end
        assert (await c.chat(stop="e!")).json()["choices"][0]["message"]["content"] == "abcde"
        assert text_of(await c.events(stop="e!")) == "abcde"


@pytest.mark.wing("router.answer_details")
async def test_chat_logprobs(c: Cluster) -> None:
    answer = await c.openai.chat.completions.create(
        model="dry-run", messages=MESSAGES, max_tokens=4, logprobs=True, top_logprobs=2, seed=3
    )
    choice = answer.choices[0]
    assert choice.logprobs is not None
    content = choice.logprobs.content
    assert content is not None
    assert "".join(item.token for item in content) == choice.message.content
    assert all(len(item.top_logprobs) == 2 and item.bytes == list(item.token.encode()) for item in content)
    stream = await c.openai.chat.completions.create(
        model="dry-run", messages=MESSAGES, max_tokens=4, logprobs=True, top_logprobs=2, seed=3, stream=True
    )
    streamed: list[Any] = []
    async for chunk in stream:
        if chunk.choices[0].logprobs and chunk.choices[0].logprobs.content:
            streamed += chunk.choices[0].logprobs.content
    assert [item.model_dump() for item in streamed] == [item.model_dump() for item in content]


async def test_special_tokens_are_shown_when_asked_for() -> None:
    reply = [*b"a", DRY_RUN.encode("<user>", False, True)[0], *b"b"]
    shown = "a" + DRY_RUN.decode([reply[1]], skip_special=False) + "b"
    assert len(shown) > 3
    async with cluster(script=Script(reply=reply)) as c:
        for skip, expected in ((None, "ab"), (True, "ab"), (False, shown)):
            answer = await c.chat(skip_special_tokens=skip)
            assert answer.json()["choices"][0]["message"]["content"] == expected
            assert text_of(await c.events(skip_special_tokens=skip)) == expected


async def test_usage_in_streams() -> None:
    async with cluster(script=Script(cached_tokens=3)) as c:
        events = await c.events(stream_options={"include_usage": True})
        assert all(event["usage"] is None for event in events[:-2])
        assert events[-2]["choices"] == []
        assert events[-2]["usage"] == {
            "prompt_tokens": 8, "completion_tokens": 8, "total_tokens": 16,
            "prompt_tokens_details": {"cached_tokens": 3},
        }  # fmt: skip
        events = await c.events(stream_options={"include_usage": True, "continuous_usage_stats": True})
        counts = [event["usage"]["completion_tokens"] for event in events[:-1]]
        assert counts == sorted(counts)
        assert counts[-1] == 8
        assert "usage" not in (await c.events())[0]
        assert not c.decode[0].cancels  # what has ended by itself is not cancelled


async def test_sampling_parameters_reach_the_worker(c: Cluster) -> None:
    answer = await c.chat(
        temperature=0, top_p=0.5, top_k=7, min_p=0.25, min_tokens=2, stop_token_ids=[70], ignore_eos=True,
        priority=-3, cache_salt="s",
    )  # fmt: skip
    assert answer.status_code == 200
    submit = c.decode[0].submits[0]
    params = submit.sampling
    assert (params.temperature, params.top_p, params.top_k, params.min_p) == (0, 0.5, 7, 0.25)
    assert (params.min_tokens, params.max_tokens, params.ignore_eos) == (2, 8, True)
    assert (submit.priority, submit.cache_salt) == (-3, "s")


async def test_max_tokens_defaults(c: Cluster) -> None:
    await c.chat(max_tokens=None)
    [chat] = c.decode[0].submits
    assert chat.sampling.max_tokens == 512 - num_ids(chat.prompt_token_ids)


async def test_a_stop_token_ends_the_text_and_is_named() -> None:
    async with cluster(script=Script(reply=list(b"abcdef"))) as c:
        answer = (await c.chat(stop_token_ids=[ord("c")])).json()
        assert answer["choices"][0]["message"]["content"] == "ab"
        assert answer["choices"][0]["stop_reason"] == ord("c")


@pytest.mark.wing("router.template_options")
async def test_a_final_message_is_continued(c: Cluster) -> None:
    messages = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "The "}]
    await c.chat(messages=messages, continue_final_message=True)
    prompt = unpack_ids(c.decode[0].submits[0].prompt_token_ids)
    assert DRY_RUN.decode(prompt, False) == "<bos><user>q<assistant>The "


@pytest.mark.wing("router.template_options")
async def test_the_continuation_of_a_message_keeps_its_first_space(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(DRY_RUN.table, "strips_prefix_space", True)  # as with SentencePiece
    messages = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "The"}]
    async with cluster(script=Script(reply=list(b" sky"))) as c:
        assert text_of(await c.events()) == "sky"
        continued: dict[str, Any] = {"messages": messages, "continue_final_message": True}
        assert text_of(await c.events(**continued)) == " sky"
        assert (await c.chat(**continued)).json()["choices"][0]["message"]["content"] == " sky"


async def test_models_and_health() -> None:
    async with cluster(num_prefill=1) as c:
        assert [model.id async for model in c.openai.models.list()] == ["dry-run"]
        assert (await c.openai.models.retrieve("dry-run")).id == "dry-run"
        with pytest.raises(openai.NotFoundError):
            await c.openai.models.retrieve("other")
        for name in ("dry-run", "mini-infer", "default"):
            assert (await c.chat(model=name, max_tokens=1)).status_code == 200
        for path in ("/health", "/readyz", "/livez", "/metrics"):
            assert (await c.http.get(path)).status_code == 200, path


async def test_a_model_may_be_served_under_any_name() -> None:
    async with cluster(served_model_name='50%d "x"') as c:
        assert [model.id async for model in c.openai.models.list()] == ['50%d "x"']
        events = await c.events(model='50%d "x"', **TWO_CHOICES)
        assert {event["model"] for event in events[:-1]} == {'50%d "x"'}
        assert (await c.chat(model="dry-run")).status_code == 200
        assert (await c.chat(model="gpt-4")).json()["error"]["code"] == "model_not_found"


async def test_metrics_carry_the_dashboards_names() -> None:
    async with cluster() as c:
        await c.chat()
        text = (await c.http.get("/metrics")).text
        for name in (
            "vllm:prompt_tokens_total", "vllm:generation_tokens_total", "vllm:request_queue_time_seconds_count",
            "vllm:request_inference_time_seconds_count", "vllm:time_to_first_token_seconds_count",
            "vllm:inter_token_latency_seconds_count", "vllm:e2e_request_latency_seconds_count",
        ):  # fmt: skip
            assert f'{name}{{model_name="dry-run"}}' in text, name
        assert 'vllm:request_success_total{finished_reason="length",model_name="dry-run"} 1.0' in text
        assert 'vllm:generation_tokens_total{model_name="dry-run"} 8.0' in text
        assert 'vllm:request_max_num_generation_tokens_sum{model_name="dry-run"} 8.0' in text
        exported = {line.split()[2].removesuffix("_total") for line in text.splitlines() if line.startswith("# TYPE")}
        exported -= {name for name in exported if name.endswith("_created")}
        assert exported == {spec.name for spec in (*ROUTER_SPECS, START_TIME)}


async def test_client_request_ids_are_labels_only(c: Cluster) -> None:
    body = {"messages": MESSAGES, "max_tokens": 1}
    first = await c.http.post("/v1/chat/completions", json=body, headers={"X-Request-Id": "mine"})
    second = await c.http.post("/v1/chat/completions", json=body, headers={"X-Request-Id": "mine"})
    assert first.headers["x-request-id"] == second.headers["x-request-id"] == "mine"
    assert first.json()["id"] != second.json()["id"]
    assert "mine" not in c.decode[0].submits[0].request_id
