"""OpenAI's official client, and plain HTTP, against workers whose vectors a test knows."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any

import openai
import pytest

from common.text.chat_template import TemplateUse
from common.token_ids import unpack_ids
from protos import types_pb2 as pb
from router.costs.roles import PolicyRoles
from router.embeddings_api.documents import beginning
from router.embeddings_api.request import MAX_OPEN
from router.template_options.fields import template_use
from tests.common.text.wrapping_tokenizer import BOS, EOS, wrapping_tokenizer
from tests.harness.router import DRY_RUN, Cluster, cluster
from tests.harness.scripted_worker import Script

SIZE = 4


def vector_of(token_ids: Sequence[int]) -> list[float]:
    """Return a vector that is unique among the prompts of the tests."""
    return [float(len(token_ids)), float(token_ids[-1]), float(sum(token_ids)), -1.5]


def normalized(vector: Sequence[float]) -> list[float]:
    length = math.hypot(*vector)
    return [value / length for value in vector]


def ids_of(text: str) -> list[int]:
    return DRY_RUN.encode(text, True, True)


def wanted(text: str | list[int], dimensions: int = SIZE) -> list[float]:
    return normalized(vector_of(ids_of(text) if isinstance(text, str) else text)[:dimensions])


@asynccontextmanager
async def pooling(vector: Callable[[list[int]], list[float]] = vector_of, **options: Any) -> AsyncIterator[Cluster]:
    """Start a cluster whose workers send a prompt's vector with its token."""
    found: list[Cluster] = []

    def add_vectors(report: pb.StepReport) -> None:
        for delta in report.deltas:
            [c] = found
            submits = {s.request_id: s for worker in (*c.prefill, *c.decode) for s in worker.submits}
            submit = submits[delta.request_id]
            assert submit.sampling.pooling
            entry = delta.logprobs.add()
            entry.top_logprobs.extend(vector(unpack_ids(submit.prompt_token_ids)))

    script = options.pop("script", None) or Script(spoil=add_vectors)
    async with cluster(script=script, info={"max_model_len": 64}, **options) as c:
        found.append(c)
        yield c


def submitted(c: Cluster) -> list[pb.Submit]:
    return [submit for worker in (*c.prefill, *c.decode) for submit in worker.submits]


@pytest.mark.parametrize(("num_prefill", "num_decode"), [(0, 1), (1, 1), (2, 2)])
async def test_openais_client(num_prefill: int, num_decode: int) -> None:
    async with pooling(num_prefill=num_prefill, num_decode=num_decode, local_prefill_tokens=0) as c:
        texts = ["abc", "a longer text", "é"]
        answer = await c.openai.embeddings.create(model="dry-run", input=texts)  # asks for base64
        assert [item.index for item in answer.data] == [0, 1, 2]
        for item, text in zip(answer.data, texts, strict=True):
            assert item.object == "embedding"
            assert item.embedding == pytest.approx(wanted(text), rel=1e-6)
        num_tokens = sum(len(ids_of(text)) for text in texts)
        assert (answer.usage.prompt_tokens, answer.usage.total_tokens) == (num_tokens, num_tokens)
        assert (answer.object, answer.model) == ("list", "dry-run")
        # Computed by the worker that computes the prompt: no worker gets a prompt's KV.
        assert len(submitted(c)) == len(texts)
        assert not any(submit.HasField("kv_handle") for submit in submitted(c))
        if num_prefill:
            assert all(not worker.submits for worker in c.decode)
        await c.until(c.is_quiet)


@pytest.mark.parametrize(
    ("given", "inputs"),
    [
        ("abc", [[97, 98, 99]]),
        (["abc", "d"], [[97, 98, 99], [100]]),
        ([1, 2, 3], [[1, 2, 3]]),
        ([[1, 2], [7]], [[1, 2], [7]]),
    ],
)
async def test_every_form_of_input(given: Any, inputs: list[list[int]]) -> None:
    async with pooling() as c:
        answer = (await c.http.post("/v1/embeddings", json={"input": given})).json()
        assert [item["embedding"] for item in answer["data"]] == [pytest.approx(wanted(each)) for each in inputs]
        assert answer["usage"] == {"prompt_tokens": sum(map(len, inputs)), "total_tokens": sum(map(len, inputs))}


async def test_dimensions_shorten_and_normalize_again() -> None:
    async with pooling() as c:
        answer = await c.openai.embeddings.create(model="dry-run", input="abc", dimensions=2, encoding_format="float")
        assert answer.data[0].embedding == pytest.approx(wanted("abc", 2))
        assert math.hypot(*answer.data[0].embedding) == pytest.approx(1.0)
        with pytest.raises(openai.BadRequestError, match="the model's vectors have 4") as caught:
            await c.openai.embeddings.create(model="dry-run", input=["abc"] * 3, dimensions=5)
        assert caught.value.param == "dimensions"
        await c.until(c.is_quiet)


async def test_vectors_as_they_are() -> None:
    async with pooling() as c:
        for name in ("normalize", "use_activation"):
            body = {"input": "abc", name: False, "dimensions": 3}
            [item] = (await c.http.post("/v1/embeddings", json=body)).json()["data"]
            assert item["embedding"] == vector_of(ids_of("abc"))[:3]
    async with pooling(vector=lambda _: [0.0, 0.0]) as c:
        [item] = (await c.http.post("/v1/embeddings", json={"input": "abc"})).json()["data"]
        assert item["embedding"] == [0.0, 0.0]


@pytest.mark.parametrize(
    ("settings", "fields", "used"),
    [({}, {}, "auto"), ({"pooling": "mean"}, {}, "mean"), ({"pooling": "mean"}, {"pooling": "last"}, "last")],
)
async def test_what_workers_are_asked_for(settings: dict[str, Any], fields: dict[str, Any], used: str) -> None:
    async with pooling(**settings) as c:
        body = {"input": "abc", "priority": 3, "cache_salt": "mine", **fields}
        assert (await c.http.post("/v1/embeddings", json=body)).status_code == 200
        [submit] = submitted(c)
        assert (submit.sampling.pooling, submit.sampling.max_tokens, submit.sampling.ignore_eos) == (used, 1, True)
        assert not submit.sampling.HasField("logprobs")
        roles = c.model.dispatcher.roles
        assert isinstance(roles, PolicyRoles)
        assert roles.answers.mean == 0  # answers to others are not expected to have one token
        assert (submit.priority, submit.cache_salt) == (3, "mine")


async def test_a_long_prompt_is_refused_or_cut() -> None:
    async with pooling() as c:
        long = list(range(1, 65))
        answer = await c.http.post("/v1/embeddings", json={"input": [[1], long]})
        error = answer.json()["error"]
        assert (answer.status_code, error["param"], error["code"]) == (400, "input", "context_length_exceeded")
        for asked, side, kept in (
            (-1, None, long[1:]), (5, "left", long[-5:]), (-1, "right", long[:-1]), (5, "right", long[:5])
        ):  # fmt: skip
            body = {"input": long, "truncate_prompt_tokens": asked, "truncation_side": side}
            await c.http.post("/v1/embeddings", json=body)
            assert unpack_ids(submitted(c)[-1].prompt_token_ids) == kept


async def test_of_long_documents_the_beginning_counts() -> None:
    async with pooling(tokenizer=wrapping_tokenizer()) as c:
        body = {"query": "abc", "documents": ["abcde", "xy", "ab"], "max_tokens_per_doc": 2}
        assert (await c.http.post("/v2/rerank", json=body)).status_code == 200
        texts = [b"abc", b"ab", b"xy", b"ab"]
        assert [unpack_ids(submit.prompt_token_ids) for submit in submitted(c)] == [[BOS, *t, EOS] for t in texts]
        for changes, document in (({"add_special_tokens": False}, [*b"ab"]), ({"max_tokens_per_doc": 4096}, None)):
            assert (await c.http.post("/v2/rerank", json={**body, **changes})).status_code == 200
            assert unpack_ids(submitted(c)[-3].prompt_token_ids) == (document or [BOS, *b"abcde", EOS])


def test_the_beginning_of_a_text_keeps_its_special_tokens() -> None:
    assert beginning([0, 5, 6, 7, 1, 2], [5, 6, 7], 2) == [0, 5, 6, 1, 2]
    assert beginning([0, 5, 6, 1], [5, 6], 3) == [0, 5, 6, 1]
    assert beginning([0, 8, 9, 9], [7, 9, 9], 2) == [0, 8]  # not the same tokens when alone


async def test_a_conversation_gives_one_vector() -> None:
    async with pooling() as c:
        messages = [{"role": "user", "content": "abc"}, {"role": "assistant", "content": "de"}]
        for changes, generates, continues in (
            ({}, False, False),
            ({"add_generation_prompt": True}, True, False),
            ({"continue_final_message": True}, False, True),
        ):
            answer = await c.http.post("/v1/embeddings", json={"messages": messages, "dimensions": 2, **changes})
            ids = DRY_RUN.apply_chat_template(messages, use=template_use(generates, continues, None))
            [item] = answer.json()["data"]
            assert item["embedding"] == pytest.approx(wanted(ids, 2))
            assert answer.json()["usage"]["prompt_tokens"] == len(ids)
        await c.http.post("/v1/embeddings", json={"messages": messages, "truncate_prompt_tokens": 5})
        whole = DRY_RUN.apply_chat_template(messages, use=TemplateUse(False))
        assert unpack_ids(submitted(c)[-1].prompt_token_ids) == whole[-5:]


HELLO = [{"role": "user", "content": "a"}]


@pytest.mark.parametrize(
    ("path", "body", "status", "param"),
    [
        ("/v1/embeddings", {"messages": []}, 400, "messages"),
        ("/v1/embeddings", {"messages": HELLO, "input": "a"}, 400, "input"),
        ("/v1/embeddings", {"messages": [{"role": "user"}]}, 400, "messages.0.content"),
        ("/v1/embeddings", {"messages": HELLO, "add_special_tokens": True}, 400, "add_special_tokens"),
        ("/v1/embeddings", {"input": "a", "add_generation_prompt": True}, 400, "add_generation_prompt"),
        (
            "/v1/embeddings",
            {"messages": HELLO, "add_generation_prompt": True, "continue_final_message": True},
            400,
            "continue_final_message",
        ),
        ("/v1/embeddings", {}, 400, "input"),
        ("/v1/embeddings", {"input": ""}, 400, "input"),
        ("/v1/embeddings", {"input": ["a", ""]}, 400, "input"),
        ("/v1/embeddings", {"input": []}, 400, "input"),
        ("/v1/embeddings", {"input": [[]]}, 400, "input"),
        ("/v1/embeddings", {"input": ["a"] * 2049}, 400, "input"),
        ("/v1/embeddings", {"input": [999_999]}, 400, "input"),
        ("/v1/embeddings", {"input": "a", "encoding_format": "hex"}, 400, "encoding_format"),
        ("/v1/embeddings", {"input": "a", "dimensions": 0}, 400, "dimensions"),
        ("/v1/embeddings", {"input": "a", "pooling": "max"}, 400, "pooling"),
        ("/v1/embeddings", {"input": "a", "truncate_prompt_tokens": 0}, 400, "truncate_prompt_tokens"),
        ("/v1/embeddings", {"input": "a", "stream": True}, 400, "stream"),
        ("/v1/embeddings", {"input": "a", "normalize": False, "use_activation": True}, 400, "use_activation"),
        ("/v1/embeddings", {"input": "a", "model": "other"}, 404, None),
        ("/v1/score", {"text_1": "a"}, 400, "text_2"),
        ("/v1/score", {"text_1": "a", "queries": "a", "text_2": "b"}, 400, "text_1"),
        ("/v1/score", {"data_1": "a", "items": "b", "data_2": "c"}, 400, "text_2"),
        ("/v1/score", {"text_1": ["a", "b"], "text_2": "c"}, 400, "text_1"),
        ("/v1/score", {"text_1": "a", "text_2": ["b", ""]}, 400, "text_2"),
        ("/v1/rerank", {"query": "a"}, 400, "documents"),
        ("/v1/rerank", {"query": "a", "documents": ["b"], "max_tokens_per_doc": 0}, 400, "max_tokens_per_doc"),
        ("/v1/rerank", {"query": "a", "documents": []}, 400, "documents"),
        ("/v1/rerank", {"query": "", "documents": ["b"]}, 400, "query"),
        ("/v1/rerank", {"query": "a", "documents": [{"title": "b"}]}, 400, "documents"),
        ("/v1/rerank", {"query": "a", "documents": ["b"], "model": "other"}, 404, None),
    ],
)
async def test_errors_have_openais_shape(path: str, body: dict[str, Any], status: int, param: str | None) -> None:
    async with pooling() as c:
        answer = await c.http.post(path, json=body)
        error = answer.json()["error"]
        assert (answer.status_code, error["param"]) == (status, param)
        assert error["type"] == ("invalid_request_error" if status == 400 else error["type"])
        assert error["message"]
        assert not submitted(c)


async def test_a_worker_without_vectors_is_an_error_of_the_server() -> None:
    async with pooling(script=Script()) as c:
        answer = await c.http.post("/v1/embeddings", json={"input": ["a", "b"]})
        assert (answer.status_code, answer.json()["error"]["message"]) == (500, "the worker gave no vector")
        await c.until(c.is_quiet)


async def test_a_large_batch_has_few_choices_open_at_a_time() -> None:
    async with pooling() as c:
        most = 0
        opened = c.model.dispatcher.opened

        def counted(journal: Any) -> None:
            nonlocal most
            opened(journal)
            most = max(most, len(c.model.dispatcher.open_choices))

        c.model.dispatcher.opened = counted  # type: ignore[method-assign]
        inputs = [[1 + i % 200, 1 + i // 200] for i in range(500)]
        answer = await c.openai.embeddings.create(model="dry-run", input=inputs)
        assert [item.index for item in answer.data] == list(range(500))
        assert answer.data[499].embedding == pytest.approx(wanted(inputs[499]), rel=1e-6)
        assert most == MAX_OPEN
        await c.until(c.is_quiet)


async def test_a_client_that_leaves_ends_the_batch() -> None:
    async with pooling(script=Script(is_silent=True)) as c:
        asked = asyncio.create_task(c.http.post("/v1/embeddings", json={"input": ["a"] * 100}))
        await c.until(lambda: len(submitted(c)) == MAX_OPEN)
        asked.cancel()
        await c.until(c.is_quiet)
        assert len(submitted(c)) == MAX_OPEN


# -- scores and reranking ------------------------------------------------------------------------------------------

ANGLES = {97: 0, 98: 10, 99: 80, 100: 180}  # degrees, by a text's last byte


def at_an_angle(token_ids: Sequence[int]) -> list[float]:
    angle = math.radians(ANGLES[token_ids[-1]])
    return [3 * math.cos(angle), 3 * math.sin(angle)]


def nearness(one: str, other: str) -> float:
    return math.cos(math.radians(ANGLES[ord(one)] - ANGLES[ord(other)]))


@pytest.mark.parametrize(
    ("left", "right", "pairs"),
    [
        ("a", "c", [("a", "c")]),
        ("a", ["b", "c", "d"], [("a", "b"), ("a", "c"), ("a", "d")]),
        (["a", "b"], ["c", "d"], [("a", "c"), ("b", "d")]),
    ],
)
@pytest.mark.parametrize(
    "names", [("text_1", "text_2"), ("queries", "documents"), ("data_1", "data_2"), ("queries", "items")]
)
async def test_scores(left: Any, right: Any, pairs: list[tuple[str, str]], names: tuple[str, str]) -> None:
    async with pooling(vector=at_an_angle) as c:
        body = {"model": "dry-run", names[0]: left, names[1]: right}
        answer = (await c.http.post("/v1/score", json=body)).json()
        assert answer["data"] == [
            {"index": i, "object": "score", "score": pytest.approx(nearness(*pair), abs=1e-6)}
            for i, pair in enumerate(pairs)
        ]
        assert (answer["object"], answer["model"]) == ("list", "dry-run")
        assert answer["id"].startswith("score-")
        assert answer["usage"]["total_tokens"] == sum(len(ids_of(text)) for text in [*left, *right])


async def test_scores_of_equal_and_of_opposite_texts_do_not_exceed_one() -> None:
    signs = {ids_of("a")[-1]: 1.0, ids_of("b")[-1]: -1.0}
    async with pooling(vector=lambda ids: [signs[ids[-1]]] * 3) as c:  # of length 1 its square is 1.0000000000000002
        answer = (await c.http.post("/v1/score", json={"text_1": "a", "text_2": ["a", "b"]})).json()
        assert [each["score"] for each in answer["data"]] == [1.0, -1.0]


async def test_reranking() -> None:
    async with pooling(vector=at_an_angle) as c:
        body: dict[str, Any] = {"query": "a", "documents": ["d", {"text": "b", "title": "B"}, "c"]}
        answer = (await c.http.post("/v1/rerank", json=body)).json()
        assert answer["results"] == [
            {"index": 1, "relevance_score": pytest.approx(nearness("a", "b"), abs=1e-6), "document": {"text": "b"}},
            {"index": 2, "relevance_score": pytest.approx(nearness("a", "c"), abs=1e-6), "document": {"text": "c"}},
            {"index": 0, "relevance_score": pytest.approx(nearness("a", "d"), abs=1e-6), "document": {"text": "d"}},
        ]
        assert answer["id"].startswith("rerank-")
        assert answer["usage"]["total_tokens"] == 4
        best = (await c.http.post("/v2/rerank", json={**body, "top_n": 1, "return_documents": False})).json()
        assert best["results"] == [{"index": 1, "relevance_score": pytest.approx(nearness("a", "b"), abs=1e-6)}]
