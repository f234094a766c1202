"""Truncation of prompts to the length that a request asks for."""

from __future__ import annotations

import pytest

from common.token_ids import unpack_ids
from tests.harness.router import DRY_RUN, Cluster, cluster

pytestmark = pytest.mark.asyncio(loop_scope="module")
LONG = bytes(range(32, 122)) * 7  # 630 tokens; the model takes 512


def last_prompt(c: Cluster) -> list[int]:
    return list(unpack_ids(c.decode[0].submits[-1].prompt_token_ids))


async def test_either_side_of_a_prompt_is_cut(c: Cluster) -> None:
    for side, kept in ((None, b"ef"), ("left", b"ef"), ("right", b"ab")):
        await c.complete("abcdef", truncate_prompt_tokens=2, truncation_side=side)
        assert bytes(last_prompt(c)) == kept
    await c.chat("abcdef", truncate_prompt_tokens=3, truncation_side="right")
    assert DRY_RUN.decode(last_prompt(c), False) == "<bos><user>a"
    refused = await c.complete(truncate_prompt_tokens=2, truncation_side="middle")
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "truncation_side")


async def test_a_prompt_is_cut_to_what_leaves_room_for_the_answer() -> None:
    text = LONG.decode()
    async with cluster() as c:
        assert (await c.complete(text)).status_code == 400
        for max_tokens, room in ((8, 8), (None, 16)):
            answer = await c.complete(text, truncate_prompt_tokens=-1, max_tokens=max_tokens)
            assert answer.status_code == 200
            assert bytes(last_prompt(c)) == LONG[-(512 - room) :]
        for fields, room in (({"max_completion_tokens": 20}, 20), ({"max_tokens": None}, 1)):
            await c.chat(text, truncate_prompt_tokens=-1, truncation_side="right", **fields)
            assert len(last_prompt(c)) == 512 - room
        await c.complete("abc", truncate_prompt_tokens=-1)
        assert bytes(last_prompt(c)) == b"abc"
        assert (await c.complete(text, truncate_prompt_tokens=-1, max_tokens=600)).status_code == 400
