"""What callers of the Python API pass by mistake is refused by name, before anything starts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from common.errors import InvalidRequestError
from engine.offline.arguments import message_list
from mini_infer import LLM, SamplingParams

PARAMS = SamplingParams(max_tokens=3, temperature=0.0)
MESSAGE = {"role": "user", "content": "hi"}


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM("dry-run", num_threads=1, num_gpu_blocks=64)


@pytest.mark.parametrize(
    ("prompts", "message"),
    [
        (None, "not NoneType"),
        (["a", None], "not NoneType"),
        (5, "not int"),
        (b"hi", "not bytes"),
        ({"prompt": "hi"}, "not dict"),
        ([{"prompt_token_ids": [1]}], "not dict"),
        ([[1.5]], "must be integers"),
        ([["a", "b"]], "must be integers"),
        ("a\ud800", "surrogate"),
    ],
    ids=repr,
)
def test_prompts(llm: LLM, prompts: Any, message: str) -> None:
    calls: tuple[Callable[[], Any], ...] = (lambda: llm.generate(prompts, PARAMS), lambda: llm.embed(prompts))
    for call in calls:
        with pytest.raises(InvalidRequestError, match=message) as refused:
            call()
        assert refused.value.param == "prompt"
    assert llm.engine.load().num_requests == 0


def test_a_stream_has_one_prompt(llm: LLM) -> None:
    with pytest.raises(InvalidRequestError, match="must be integers"):
        list(llm.stream(["hi"], PARAMS))  # type: ignore[list-item]


def test_token_ids_may_be_arrays(llm: LLM) -> None:
    expected = llm.generate([1, 2, 3], PARAMS)[0].token_ids
    for prompts in (np.array([1, 2, 3]), torch.tensor([1, 2, 3]), [np.array([1, 2, 3])], (n for n in (1, 2, 3))):
        [answer] = llm.generate(prompts, PARAMS)  # type: ignore[arg-type]
        assert answer.token_ids == expected
        assert answer.prompt_token_ids == [1, 2, 3]
    assert llm.generate([], PARAMS) == []


@pytest.mark.parametrize("params", [{"max_tokens": 3}, "x", [None], 5], ids=repr)
def test_parameters_of_another_kind(llm: LLM, params: Any) -> None:
    with pytest.raises(InvalidRequestError, match="must be SamplingParams"):
        llm.generate(["a"], params)


@pytest.mark.parametrize(
    "messages",
    ["hi", MESSAGE, [[MESSAGE], [MESSAGE]], ["hi"], [], None],
    ids=["text", "one", "several", "list", "[]", "None"],
)
def test_a_chat_is_one_conversation(llm: LLM, messages: Any) -> None:
    with pytest.raises(InvalidRequestError, match="messages must be one conversation"):
        llm.chat(messages, PARAMS)


@pytest.mark.parametrize(
    ("message", "param"),
    [
        ({"content": "hi"}, "messages.1.role"),
        ({"role": "user", "content": 5}, "messages.1.content"),
        ({"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}, "messages.1.content"),
        ({"role": "assistant", "tool_calls": [{"name": "f"}]}, "messages.1.tool_calls"),
    ],
    ids=["no role", "number", "image", "call"],
)
def test_messages_that_no_template_can_show(llm: LLM, message: dict[str, Any], param: str) -> None:
    with pytest.raises(InvalidRequestError, match=param[:10]) as refused:
        llm.chat([MESSAGE, message], PARAMS)
    assert refused.value.param == param


def test_messages_have_the_form_that_templates_expect() -> None:
    """As those of requests to a router: texts, and arguments of calls as an object."""
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    calls = [
        {"id": "1", "type": "function", "function": {"name": "f", "arguments": text}} for text in ('{"a": 1}', "x")
    ]
    made = message_list(
        [{"role": "user", "content": parts}, {"role": "assistant", "content": None, "tool_calls": calls}]
    )
    assert [message["content"] for message in made] == ["a\nb", ""]
    assert [call["function"]["arguments"] for call in made[1]["tool_calls"]] == [{"a": 1}, "x"]
    assert calls[0]["function"] == {"name": "f", "arguments": '{"a": 1}'}


@pytest.mark.parametrize("stop", [5, ["a", None], b"a"], ids=repr)
def test_stop_strings_are_texts(llm: LLM, stop: Any) -> None:
    with pytest.raises(InvalidRequestError, match="stop must be a text or a list of texts"):
        llm.generate("a", PARAMS, stop)


def test_no_stop_string_may_be_none(llm: LLM) -> None:
    """As in vLLM."""
    assert llm.generate("a", PARAMS, None) == llm.generate("a", PARAMS)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("field", "values", "message"),
    [
        ("max_tokens", [None, "5", 2.5, True], "must be an integer, not"),
        ("top_k", [None, 2.5], "must be an integer, not"),
        ("seed", [1.5, "a", True], "must be an integer, not"),
        ("logprobs", [True, 1.5, "1"], "must be an integer, not"),
        ("temperature", [None, "1"], "must be a number, not"),
        ("repetition_penalty", [None], "must be a number, not"),
        ("stop_token_ids", [None, 5], "must be a tuple"),
        ("bad_words", ["a"], "must be a tuple"),
        ("logit_bias", [{5: 1.0}], "must be a tuple"),
        ("logit_bias", [((5, float("nan")),), ((5, float("inf")),), (5,), ((5, "1"),)], "a finite number"),
    ],
)
def test_sampling_parameters_of_another_type(field: str, values: list[Any], message: str) -> None:
    for value in values:
        with pytest.raises(InvalidRequestError, match=message) as refused:
            SamplingParams(**{"max_tokens": 3, field: value})
        assert refused.value.param == field


def test_a_top_k_of_minus_one_is_off() -> None:
    assert SamplingParams(top_k=-1) == SamplingParams()
    with pytest.raises(InvalidRequestError, match="top_k must be 0"):
        SamplingParams(top_k=-2)


def test_numbers_of_numpy_and_lists_are_taken(llm: LLM) -> None:
    params = SamplingParams(
        max_tokens=np.int64(3),  # type: ignore[arg-type]
        temperature=np.float32(0.0),  # type: ignore[arg-type]
        logit_bias=[(5, 100)],  # type: ignore[arg-type]
        stop_token_ids=[7],  # type: ignore[arg-type]
    )
    assert llm.generate("a", params)[0].token_ids == [5, 5, 5]


@pytest.mark.parametrize("field", ["stop_token_ids", "allowed_token_ids", "bad_words"])
def test_token_ids_are_integers(llm: LLM, field: str) -> None:
    value = ("a",)
    with pytest.raises(InvalidRequestError, match=f"{field} must hold token ids") as refused:
        llm.generate("a", SamplingParams(**{field: value}))  # type: ignore[arg-type]
    assert refused.value.param == field
    assert llm.engine.load().num_requests == 0
