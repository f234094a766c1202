"""KV that a prefill worker keeps for a request: read by one decode worker, or released at once."""

from __future__ import annotations

import asyncio

import pytest

from protos import types_pb2 as pb
from tests.harness.router import Cluster, cluster
from tests.harness.scripted_worker import Script


def lease_names(c: Cluster) -> list[str]:
    return [f"lease-{submit.request_id}" for submit in c.prefill[0].submits]


async def test_kv_that_no_decode_worker_read_is_released() -> None:
    async with cluster(num_prefill=1, local_prefill_tokens=0, script=Script()) as c:
        c.decode[0].script.refuse = pb.FAILURE_CODE_INTERNAL
        assert (await c.chat()).status_code == 500
        await c.until(lambda: c.prefill[0].releases)
        assert c.prefill[0].releases == [f"lease-{c.prefill[0].submits[0].request_id}"]
        c.decode[0].script.refuse = None
        assert (await c.chat()).status_code == 200
        assert len(c.prefill[0].releases) == 1


@pytest.mark.parametrize("stream", [False, True])
async def test_kv_is_released_when_the_first_token_ends_the_text(stream: bool) -> None:
    async with cluster(num_prefill=1, local_prefill_tokens=0, script=Script(reply=list(b"!abc"))) as c:
        assert (await c.chat(stop="!", stream=stream)).status_code == 200
        await c.until(lambda: c.prefill[0].releases == lease_names(c))
        assert not c.decode[0].submits
        await c.until(c.is_quiet)


async def test_kv_is_its_readers_to_release_when_the_client_leaves_before_decode_begins() -> None:
    """The decode worker may be reading it, and would find other KV there."""
    async with cluster(num_prefill=1, local_prefill_tokens=0) as c:
        c.decode[0].script.is_silent = True
        request = asyncio.create_task(c.events())
        await c.until(lambda: bool(c.decode[0].submits))
        request.cancel()
        with pytest.raises(asyncio.CancelledError):
            await request
        await c.until(lambda: len(c.decode[0].cancels) == 1)
        await c.until(c.is_quiet)
        assert not c.prefill[0].releases


async def test_a_request_asks_for_one_prefill_however_often_it_moves() -> None:
    """So no handle ever takes the place of another: with a token there is nothing left to prefill elsewhere."""
    async with cluster(num_prefill=2, num_decode=2, local_prefill_tokens=0) as c:
        for worker in c.decode:
            worker.script.refuse = pb.FAILURE_CODE_UNAVAILABLE
        assert (await c.events())[-2]["error"]["type"] == "service_unavailable_error"
        assert sum(len(worker.submits) for worker in c.prefill) == 1
        assert sum(len(worker.submits) for worker in c.decode) == 3
        handles = {submit.kv_handle.lease_id for worker in c.decode for submit in worker.submits}
        await c.until(lambda: {name for worker in c.prefill for name in worker.releases} == handles)
        assert len(handles) == 1


async def test_without_a_handle_decode_computes_the_prompt() -> None:
    async with cluster(num_prefill=1, local_prefill_tokens=0) as c:
        control = (await c.chat(max_tokens=20)).json()
        c.prefill[0].script.has_no_handle = True
        assert (await c.chat(max_tokens=20)).json()["choices"] == control["choices"]
        assert [submit.HasField("kv_handle") for submit in c.decode[0].submits] == [True, False]
