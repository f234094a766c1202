"""Fields of vLLM's requests that change what a prompt or an answer looks like."""

from __future__ import annotations

from typing import Any

import pytest

from common.token_ids import unpack_ids
from tests.harness.router import DRY_RUN, Cluster, cluster
from tests.harness.scripted_worker import Script

pytestmark = pytest.mark.asyncio(loop_scope="module")


def last_prompt(c: Cluster) -> list[int]:
    return list(unpack_ids(c.decode[0].submits[-1].prompt_token_ids))


@pytest.mark.wing("router.answer_details")
async def test_log_probabilities_may_name_token_ids() -> None:
    async with cluster(script=Script(reply=list(b"abc"))) as c:
        asked: dict[str, Any] = {"return_tokens_as_token_ids": True, "max_tokens": 3}
        chat = (await c.chat(logprobs=True, top_logprobs=1, **asked)).json()["choices"][0]["logprobs"]["content"]
        assert [entry["token"] for entry in chat] == ["token_id:97", "token_id:98", "token_id:99"]
        assert [bytes(entry["bytes"]) for entry in chat] == [b"a", b"b", b"c"]
        assert all(top["token"].startswith("token_id:") for entry in chat for top in entry["top_logprobs"])


@pytest.mark.wing("router.answer_details")
async def test_the_text_of_a_prompt_is_shown(c: Cluster) -> None:
    answer = (await c.chat("Hi", return_prompt_text=True)).json()
    assert answer["prompt_text"] == DRY_RUN.decode(last_prompt(c), False) == "<bos><user>Hi<assistant>"
    first, *others = await c.events(return_prompt_text=True, return_token_ids=True, n=1)
    assert first["prompt_text"] == "<bos><user>Hello<assistant>"
    assert first["prompt_token_ids"] == last_prompt(c)
    assert not any("prompt_text" in event for event in others)
    assert "prompt_text" not in (await c.chat("Hi")).json()


@pytest.mark.wing("router.routing.policies")
async def test_a_session_stays_at_its_worker() -> None:
    """The field works like the header, which has precedence."""
    async with cluster(num_decode=3, policy="session-sticky") as c:

        async def worker_of(header: str = "", **fields: Any) -> int:
            before = [len(worker.submits) for worker in c.decode]
            body = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 1, **fields}
            headers = {"x-session-id": header} if header else {}
            assert (await c.http.post("/v1/chat/completions", json=body, headers=headers)).status_code == 200
            return next(index for index, worker in enumerate(c.decode) if len(worker.submits) > before[index])

        by_header = {name: await worker_of(name) for name in map(str, range(12))}
        assert len(set(by_header.values())) > 1
        assert {name: await worker_of(session_id=name, user="u") for name in by_header} == by_header
        assert {name: await worker_of(name, session_id="other") for name in by_header} == by_header
