"""Advice that a model's chat template does not read, and what an answer's header says of it."""

from __future__ import annotations

from typing import Any

import pytest

from tests.harness.router import DRY_RUN, cluster

READING = (
    "{% if reasoning_effort is not defined %}{% set reasoning_effort = 'low' %}{% endif %}{{ reasoning_effort }}"
)
THINKS = "{# <think> </think> #}"


@pytest.mark.parametrize(
    ("template", "fields", "named"),
    [
        ("", {"reasoning_effort": "low", "verbosity": "high"}, "reasoning_effort, verbosity"),
        (READING, {"reasoning_effort": "low", "verbosity": None}, None),
        ("{{ verbosity }}", {"verbosity": "low", "metadata": {"a": "b"}}, "metadata"),
        (
            "{{ enable_thinking }}",
            {"chat_template_kwargs": {"enable_thinking": True, "x": 1, "a\r\nb": 1}},
            "chat_template_kwargs, chat_template_kwargs.x",
        ),
        ("", {"chat_template_kwargs": {f"x{number}": 1 for number in range(16)}, "verbosity": "low"}, "..."),
        ("", {}, None),
    ],
)
async def test_the_answer_names_advice_that_is_not_heeded(
    template: str, fields: dict[str, Any], named: str | None
) -> None:
    body = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 1}
    async with cluster(tokenizer=DRY_RUN.with_templates({"default": f"{template}Hi"})) as c:
        for stream in (False, True):
            answer = await c.http.post("/v1/chat/completions", json={**body, **fields, "stream": stream})
            assert answer.status_code == 200
            ignored = answer.headers.get("x-mini-infer-ignored")
            assert ignored == named if named != "..." else ignored.endswith("x8, ...")


@pytest.mark.wing("router.reasoning")
@pytest.mark.parametrize(
    ("template", "fields", "named"),
    [
        (THINKS, {"reasoning_effort": "none"}, "reasoning_effort"),  # its markers are no tokens: nothing ends it
        (THINKS + "{{ enable_thinking }}", {"reasoning_effort": "none"}, None),
        ("", {"reasoning_effort": "none"}, "reasoning_effort"),
        ("", {"reasoning": {"effort": "low"}}, "reasoning.effort"),
        ("", {"reasoning": {"enabled": False}}, "reasoning.enabled"),
        (READING, {"reasoning": {"effort": "low"}}, None),
    ],
)
async def test_so_it_does_with_efforts(template: str, fields: dict[str, Any], named: str | None) -> None:
    await test_the_answer_names_advice_that_is_not_heeded(template, fields, named)
