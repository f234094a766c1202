"""A client leaves between prefill and decode: the KV is freed when its reader hears of it, not by the lease's end."""

from __future__ import annotations

import asyncio
import signal
import time
from typing import Any

import openai

from tests.cluster.harness import Cluster, running_cluster
from tests.processes import until_stopped

LEASE_SECONDS = 100  # longer than the test may take


def load_of(cluster: Cluster, name: str) -> dict[str, Any]:
    return next(w["load"] for w in cluster.get("/v1/cluster")["workers"] if w["id"] == name)


def num_in_use(load: dict[str, Any]) -> int:
    return int(load["kv_blocks"] - load["kv_blocks_free"] - load["kv_blocks_cached"])


async def until_load(cluster: Cluster, name: str, condition: Any) -> None:
    deadline = time.monotonic() + 60
    while not condition(load := load_of(cluster, name)):
        assert time.monotonic() < deadline, load
        await asyncio.sleep(0.02)


async def until_idle(cluster: Cluster) -> None:
    """Until the router has no request."""
    deadline = time.monotonic() + 60
    while (state := cluster.get("/v1/cluster"))["running"] or state["waiting"]:
        assert time.monotonic() < deadline, state
        await asyncio.sleep(0.02)


async def test_kv_of_a_client_that_left_before_the_pull_is_freed() -> None:
    worker_args = (f"--kv-lease-seconds={LEASE_SECONDS}",)
    router_args = ("--local-prefill-tokens=0", "--worker-timeout-seconds=60")
    with running_cluster(worker_args=worker_args, router_args=router_args) as cluster:
        decode = cluster.services["decode-0"]
        decode.signal(signal.SIGSTOP)  # it will not pull
        until_stopped(decode.pid)
        try:
            async with openai.AsyncOpenAI(base_url=cluster.url + "/v1", api_key="none", max_retries=0) as client:
                # Greedy: a sampled byte may be a part of a character, which has no text of its own to show.
                stream = await client.completions.create(
                    model="dry-run",
                    prompt="a prompt of some blocks " * 10,
                    max_tokens=50,
                    temperature=0,
                    stream=True,
                    extra_body={"ignore_eos": True},
                )
                assert (await anext(aiter(stream))).choices[0].text  # the first token, from prefill
                await until_load(cluster, "prefill-0", lambda load: load["leases"] == 1 and num_in_use(load) > 0)
                await stream.close()
            await until_idle(cluster)
            assert load_of(cluster, "prefill-0")["leases"] == 1  # the decode worker may be reading
        finally:
            decode.signal(signal.SIGCONT)
        await until_load(cluster, "prefill-0", lambda load: load["leases"] == 0 and num_in_use(load) == 0)
        workers = cluster.wait_quiet()
        assert len(workers) == 2
        client_again = cluster.client()
        answer = client_again.completions.create(
            model="dry-run", prompt="a prompt of some blocks " * 10, max_tokens=5
        )
        assert answer.choices[0].finish_reason
        client_again.close()
        cluster.wait_quiet()
