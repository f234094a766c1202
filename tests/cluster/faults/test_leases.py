"""A client leaves between prefill and decode: the KV is freed when its reader hears of it, not by the lease's end."""

from __future__ import annotations

import signal

from tests.harness.clients import async_client
from tests.harness.cluster import Cluster, blocks_in_use, running_cluster
from tests.harness.processes import until_stopped
from tests.harness.waiting import until

LEASE_SECONDS = 100  # longer than the test takes


def num_open(cluster: Cluster) -> int:
    """Return the number of the router's open requests."""
    state = cluster.get("/v1/cluster")
    return int(state["running"] + state["waiting"])


def is_kept(cluster: Cluster) -> bool:
    """Whether the prefill worker keeps the KV of one request."""
    load = cluster.load_of("prefill-0")
    return load["leases"] == 1 and blocks_in_use(load) > 0


def is_freed(cluster: Cluster) -> bool:
    load = cluster.load_of("prefill-0")
    return load["leases"] == 0 and blocks_in_use(load) == 0


async def test_kv_of_a_client_that_left_before_the_pull_is_freed() -> None:
    worker_args = (f"--kv-lease-seconds={LEASE_SECONDS}",)
    router_args = ("--local-prefill-tokens=0", "--worker-timeout-seconds=60")
    with running_cluster(worker_args=worker_args, router_args=router_args) as cluster:
        decode = cluster.services["decode-0"]
        decode.signal(signal.SIGSTOP)  # it will not pull
        until_stopped(decode.pid)
        try:
            async with async_client(cluster.url) as client:
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
                await until(lambda: is_kept(cluster))
                await stream.close()
            await until(lambda: num_open(cluster) == 0)
            assert is_kept(cluster)  # the decode worker may be reading
        finally:
            decode.signal(signal.SIGCONT)
        await until(lambda: is_freed(cluster))
        assert len(cluster.wait_quiet()) == 2
        assert cluster.ask("a prompt of some blocks " * 10, 5).choices[0].finish_reason
        cluster.wait_quiet()
