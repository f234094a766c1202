"""Responses in the background, through OpenAI's official client."""

from __future__ import annotations

import asyncio
from typing import Any

import openai
import pytest

from protos import types_pb2 as pb
from tests.harness.router import Cluster, replying
from tests.router.responses_api.test_responses import CALL, TEMPLATE, WEATHER, ask, responses

TEXT = f"<think>\nHm.\n</think>\n\nI look: é\n{CALL}"


async def over(c: Cluster, response_id: str) -> Any:
    """Wait until the response has ended; return it."""
    while True:
        response = await responses(c).retrieve(response_id)
        if response.status not in ("queued", "in_progress"):
            return response
        await asyncio.sleep(0.005)


async def test_a_response_in_the_background_is_there_later() -> None:
    async with replying(TEXT, is_silent=True, template=TEMPLATE) as c:
        created = await ask(c, tools=[WEATHER], background=True)
        assert (created.status, created.background, created.output) == ("queued", True, [])
        [item] = (await responses(c).input_items.list(created.id)).data
        assert item.content[0].text == "Hello"
        with pytest.raises(openai.BadRequestError, match="not complete") as refused:
            await ask(c, previous_response_id=created.id)
        assert refused.value.param == "previous_response_id"
        assert (await responses(c).retrieve(created.id)).to_dict() == created.to_dict()
        c.decode[0].speak()
        response = await over(c, created.id)
        assert (response.status, response.output_text) == ("completed", "I look: é")
        assert [item.type for item in response.output] == ["reasoning", "message", "function_call"]
        assert response.usage.output_tokens > 0
        assert (await responses(c).cancel(created.id)).to_dict() == response.to_dict()  # it was too late
        await c.until(c.is_quiet)


async def test_progress_is_seen_and_a_cancel_ends_the_generation() -> None:
    async with replying("x" * 300, pause_seconds=0.01, template=TEMPLATE) as c:
        created = await ask(c, background=True)
        while not (seen := await responses(c).retrieve(created.id)).output_text:
            await asyncio.sleep(0.005)
        assert (seen.status, seen.output[0].status) == ("in_progress", "in_progress")
        cancelled = await responses(c).cancel(created.id)
        assert (cancelled.status, cancelled.output[0].status) == ("cancelled", "incomplete")
        assert 0 < len(cancelled.output_text) < 300
        await c.until(c.is_quiet)
        assert c.decode[0].cancels
        for found in (await responses(c).retrieve(created.id), await responses(c).cancel(created.id)):
            assert found.to_dict() == cancelled.to_dict()
        events = [event.type async for event in await responses(c).retrieve(created.id, stream=True)]
        assert events[-1] == "response.output_item.done"  # no event says that it was cancelled


async def test_events_come_to_whoever_asks_while_and_after_it_runs() -> None:
    async with replying(TEXT, pause_seconds=0.002, template=TEMPLATE) as c:
        stream = await responses(c).create(
            model="dry-run", input="?", background=True, stream=True, max_output_tokens=400, tools=[WEATHER]
        )
        seen = [await anext(stream) for _ in range(6)]
        assert [event.type for event in seen[:3]] == ["response.created", "response.queued", "response.in_progress"]
        response_id = seen[0].response.id
        assert seen[0].response.status == "queued"
        await stream.close()  # the client goes away; the response does not
        rest = [event async for event in await responses(c).retrieve(response_id, stream=True, starting_after=5)]
        events = [*seen, *rest]
        assert [event.sequence_number for event in events] == list(range(len(events)))
        assert events[-1].type == "response.completed"
        again = [event async for event in await responses(c).retrieve(response_id, stream=True)]
        assert [event.to_dict() for event in again] == [event.to_dict() for event in events]
        assert (await over(c, response_id)).to_dict() == events[-1].response.to_dict()


async def test_a_response_is_complete_as_soon_as_its_last_event_says_so() -> None:
    async with replying("Yes.", template=TEMPLATE) as c:
        for _ in range(10):
            created = await ask(c, background=True)
            async for event in await responses(c).retrieve(created.id, stream=True):
                if event.type == "response.completed":
                    found = await responses(c).retrieve(created.id)
                    assert found.to_dict() == event.response.to_dict()


@pytest.mark.parametrize(
    ("script", "text", "message"),
    [({"die_after_tokens": 5}, "x", "gave up"), ({"refuse": pb.FAILURE_CODE_INTERNAL}, "", "refused by script")],
)
async def test_a_failure_is_stored(script: dict[str, Any], text: str, message: str) -> None:
    async with replying("x" * 50, **script, max_retries=0, template=TEMPLATE) as c:
        failed = await over(c, (await ask(c, background=True)).id)
        assert (failed.status, failed.output_text[:1]) == ("failed", text)
        assert message in failed.error.message
        events = [event async for event in await responses(c).retrieve(failed.id, stream=True)]
        assert [event.type for event in events[-2:]] == ["error", "response.failed"]
        assert [event.sequence_number for event in events] == list(range(len(events)))
        assert events[-1].response.to_dict() == failed.to_dict()


async def test_a_response_that_waits_or_runs_can_be_deleted() -> None:
    async with replying("x" * 300, is_silent=True, template=TEMPLATE) as c:
        created = await ask(c, background=True)
        await responses(c).delete(created.id)
        with pytest.raises(openai.NotFoundError):
            await responses(c).retrieve(created.id)
        await c.until(c.is_quiet)


async def test_a_request_that_cannot_be_served_is_refused_at_once() -> None:
    async with replying("x", template=TEMPLATE) as c:
        with pytest.raises(openai.BadRequestError) as refused:
            await ask(c, "x" * 5000, background=True)
        assert refused.value.param == "input"
        fields = {"model": "dry-run", "input": "?", "background": True, "service_tier": "flex"}
        answer = await c.http.post("/v1/responses", json=fields)
        assert answer.headers["x-mini-infer-ignored"] == "service_tier"
        assert answer.headers["x-mini-infer-id"].startswith("chatcmpl-")
        await over(c, answer.json()["id"])


async def test_what_runs_ends_with_the_router() -> None:
    async with replying("x" * 300, is_silent=True, template=TEMPLATE) as c:
        await ask(c, background=True)
        await c.until(lambda: c.decode[0].submits)
