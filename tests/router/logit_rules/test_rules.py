"""Penalties, biases and masks of a request."""

from __future__ import annotations

from tests.harness.router import cluster


async def test_rules_reach_the_worker() -> None:
    async with cluster() as c:
        answer = await c.chat(
            presence_penalty=1, frequency_penalty=-1, repetition_penalty=1.5, logit_bias={"65": -100, "66": 1.5},
            allowed_token_ids=[65, 66, 70], bad_words=["ab"],
        )  # fmt: skip
        assert answer.status_code == 200
        params = c.decode[0].submits[0].sampling
        assert (params.presence_penalty, params.frequency_penalty, params.repetition_penalty) == (1, -1, 1.5)
        assert {bias.token_id: bias.bias for bias in params.logit_bias} == {65: -100, 66: 1.5}
        assert list(params.allowed_token_ids) == [65, 66, 70]
        assert [bytes(word.token_ids) for word in params.bad_words] == [b"ab", b" ab"]
