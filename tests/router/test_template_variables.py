"""Variables of a chat template, from a request to the prompt."""

from __future__ import annotations

import pytest

from tests.harness.router import DRY_RUN, cluster


@pytest.mark.wing("router.answer_details")
@pytest.mark.wing("router.template_options")
async def test_advice_is_a_variable_of_templates_that_read_it() -> None:
    template = "{{ messages[0].content }}{{ reasoning_effort | default('medium') }}{{ verbosity }}"
    async with cluster(tokenizer=DRY_RUN.with_templates({"default": template})) as c:
        for fields, prompt in (
            ({}, b"Hi medium"),
            ({"reasoning_effort": "low", "verbosity": "high"}, b"Hi lowhigh"),
            ({"reasoning_effort": "low", "chat_template_kwargs": {"reasoning_effort": "none"}}, b"Hi none"),
        ):
            answer = (await c.chat("Hi ", **fields, max_tokens=1, return_token_ids=True)).json()
            assert bytes(answer["prompt_token_ids"]) == prompt
