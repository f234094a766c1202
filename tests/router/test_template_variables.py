"""Variables of a chat template, from a request to the prompt."""

from __future__ import annotations

from common.text.tokenizer import Tokenizer
from tests.harness.router import DRY_RUN, cluster

TEMPLATE = "{{ messages[0].content }}{{ '!' if enable_thinking else '.' }}"


async def test_variables_reach_the_chat_template() -> None:
    tokenizer = Tokenizer(
        DRY_RUN._backend,
        bos_id=256,
        eos_token_ids=[257],
        templates={"default": TEMPLATE},
        vocab_size=DRY_RUN.vocab_size,
    )
    body = {"messages": [{"role": "user", "content": "Hello"}]}
    async with cluster(tokenizer=tokenizer) as c:
        for fields, prompt in (({"chat_template_kwargs": {"enable_thinking": True}}, b"Hello!"), ({}, b"Hello.")):
            asked = {**body, **fields, "max_tokens": 1, "return_token_ids": True}
            answer = (await c.http.post("/v1/chat/completions", json=asked)).json()
            assert bytes(answer["prompt_token_ids"]) == prompt


async def test_advice_is_a_variable_of_templates_that_read_it() -> None:
    template = "{{ messages[0].content }}{{ reasoning_effort | default('medium') }}{{ verbosity }}"
    tokenizer = Tokenizer(
        DRY_RUN._backend, bos_id=256, eos_token_ids=[257], templates={"default": template},
        vocab_size=DRY_RUN.vocab_size,
    )  # fmt: skip
    body = {"messages": [{"role": "user", "content": "Hi "}], "max_tokens": 1, "return_token_ids": True}
    async with cluster(tokenizer=tokenizer) as c:
        for fields, prompt in (
            ({}, b"Hi medium"),
            ({"reasoning_effort": "low", "verbosity": "high"}, b"Hi lowhigh"),
            ({"reasoning_effort": "low", "chat_template_kwargs": {"reasoning_effort": "none"}}, b"Hi none"),
        ):
            answer = (await c.http.post("/v1/chat/completions", json={**body, **fields})).json()
            assert bytes(answer["prompt_token_ids"]) == prompt
