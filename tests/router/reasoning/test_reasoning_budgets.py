"""Budgets of reasoning and turning it off: the grammar for workers, and the variables of templates."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import openai
import pytest

from common.grammar.grammar import for_llguidance
from common.text.tokenizer import Tokenizer
from common.token_ids import unpack_ids
from tests.harness.router import DRY_RUN, Cluster, cluster, replying
from tests.harness.scripted_worker import Script
from tests.router.reasoning.test_reasoning import REPLY, SCHEMA, TEMPLATE, TOOLS, ask, streamed

BOUNDED: list[dict[str, Any]] = [{"thinking_token_budget": 9}, {"reasoning": {"max_tokens": 9}}]


NO_THINKING: list[dict[str, Any]] = [
    {"thinking_token_budget": 0}, {"reasoning_effort": "none"}, {"reasoning": {"enabled": False}},
    {"reasoning": {"effort": "none"}}, {"reasoning": {"max_tokens": 0}},
]  # fmt: skip


@asynccontextmanager
async def with_markers(template: str = TEMPLATE) -> AsyncIterator[Cluster]:
    """Start a cluster in whose tokenizer the markers are single tokens."""
    backend = type(DRY_RUN._backend).from_str(DRY_RUN._backend.to_str())
    backend.add_tokens(["<think>", "</think>"])
    tokenizer = Tokenizer(backend, bos_id=256, eos_token_ids=[257], templates={"default": template}, vocab_size=320)
    reply = tokenizer.encode(REPLY)
    async with cluster(script=Script(reply=reply), tokenizer=tokenizer, info={"max_model_len": 4096}) as c:
        yield c


@pytest.mark.parametrize("extra", BOUNDED, ids=str)
async def test_a_budget_of_tokens_is_a_grammar(extra: dict[str, Any]) -> None:
    async with with_markers() as c:
        message = (await ask(c, extra_body=extra)).choices[0].message
        assert (message.reasoning, message.content) == ("É. 2 < 3.", "Yes.")
        assert "{0,9}" in c.decode[0].submits[-1].sampling.grammar
        await ask(c, extra_body=extra, response_format=SCHEMA)
        followed = for_llguidance(c.decode[0].submits[-1].sampling.grammar)
        assert "{0,9}" in followed
        assert "@json_schema" in followed
        await ask(c, extra_body=extra, tools=[{**TOOLS[0], "function": {"name": "get_time", "strict": True}}])
        followed = c.decode[0].submits[-1].sampling.grammar
        assert "{0,9}" in followed
        assert "before_call call" in followed
        found = await streamed(c, extra_body=extra, n=2)
        assert found["finish_reason"] == "stop"


@pytest.mark.parametrize("extra", NO_THINKING, ids=str)
async def test_no_thinking_is_the_templates_where_it_can(extra: dict[str, Any]) -> None:
    async with with_markers() as c:
        await ask(c, extra_body=extra)
        submitted = c.decode[0].submits[-1]
        assert not submitted.sampling.grammar
        assert DRY_RUN.decode(unpack_ids(submitted.prompt_token_ids)[-2:]) == "\n\n"
    async with with_markers(TEMPLATE.replace("enable_thinking", "unknown")) as c:
        await ask(c, extra_body=extra)
        assert "reasoning: <[" in c.decode[0].submits[-1].sampling.grammar


async def test_templates_learn_of_a_budget_and_clients_decide() -> None:
    template = TEMPLATE + "{{ thinking_budget }}|{{ enable_thinking }}"
    for extra, shown in (
        ({"thinking_token_budget": 9}, b"9|"),
        ({"thinking_token_budget": 0, "chat_template_kwargs": {"enable_thinking": True}}, b"0|True"),
    ):
        async with with_markers(template) as c:
            await ask(c, extra_body=extra)
            assert bytes(unpack_ids(c.decode[0].submits[-1].prompt_token_ids)).endswith(shown)


async def test_a_budget_of_minus_one_is_none() -> None:
    async with with_markers(TEMPLATE + "{{ thinking_budget is defined }}") as c:
        message = (await ask(c, extra_body={"thinking_token_budget": -1})).choices[0].message
        assert (message.reasoning, message.content) == ("É. 2 < 3.", "Yes.")
        submitted = c.decode[0].submits[-1]
        assert not submitted.sampling.grammar
        assert bytes(unpack_ids(submitted.prompt_token_ids)).endswith(b"False")


async def test_options_name_an_effort() -> None:
    async with with_markers(TEMPLATE + "{{ reasoning_effort }}") as c:
        for extra, shown in (
            ({"reasoning": {"effort": "low"}}, b"low"),
            ({"reasoning": {"effort": "low"}, "reasoning_effort": "high"}, b"high"),
        ):
            await ask(c, extra_body=extra)
            assert bytes(unpack_ids(c.decode[0].submits[-1].prompt_token_ids)[-len(shown) :]) == shown


@pytest.mark.parametrize("extra", BOUNDED, ids=str)
async def test_what_cannot_be_bounded_is_refused(extra: dict[str, Any]) -> None:
    async with replying(REPLY, template=TEMPLATE) as c:
        with pytest.raises(openai.BadRequestError, match="no tokens of their own") as refused:
            await ask(c, extra_body=extra)
        assert refused.value.param == "thinking_token_budget"
        await ask(c, extra_body={"reasoning_effort": "none"})  # advice
    async with replying("Yes.", template="{{ messages }}") as c:
        with pytest.raises(openai.BadRequestError, match="does not reason"):
            await ask(c, extra_body=extra)
        with pytest.raises(openai.BadRequestError, match="exclude each other"):
            await ask(c, extra_body={**BOUNDED[0], **BOUNDED[1]})
        await ask(c, extra_body={"reasoning_effort": "none"})
