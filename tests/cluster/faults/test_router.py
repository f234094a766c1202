"""A router with a stream open: SIGTERM lets it end, SIGKILL breaks it, and the next router finds the workers."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager

import httpx
import openai
import pytest

from tests.harness.clients import get
from tests.harness.cluster import SHORT_LEASES, Cluster, running_cluster
from tests.harness.processes import until_stopped

NUM_TOKENS = 100
# A step takes 10 ms however fast the machine is: a stream lasts a second, and computes nothing.
ENGINE = ("--model=dry-run", "--num-gpu-blocks=256", "--num-threads=1", "--simulated-steps=base=0.01")
PATIENT = "--worker-timeout-seconds=250"  # with a decode worker that is stopped


@contextmanager
def stopped_after_a_token(cluster: Cluster) -> Iterator[Iterator[openai.types.Completion]]:
    """Start a stream whose decode worker is stopped after a token, before it reports the end."""
    decode = cluster.services["decode-0"]
    for _ in range(10):  # a busy machine may have computed and told all of it first
        stream = iter(
            cluster.client().completions.create(
                model="dry-run",
                prompt="A stream that outlives its router's SIGTERM",
                max_tokens=NUM_TOKENS,
                stream=True,
                extra_body={"ignore_eos": True},
            )
        )
        next(stream)
        decode.signal(signal.SIGSTOP)
        try:
            until_stopped(decode.pid)
            time.sleep(0.2)  # for what it has told
            if cluster.get("/v1/cluster")["running"]:
                yield stream
                return
        finally:
            decode.signal(signal.SIGCONT)
    pytest.fail("no stream lasted")


def accepts_connections(cluster: Cluster) -> bool:
    try:
        get(f"{cluster.url}/healthz")
    except httpx.TransportError:
        return False
    return True


def test_a_stream_is_finished_before_the_router_ends_and_cut_when_the_grace_is_over() -> None:
    router_args = (PATIENT, "--drain-grace-seconds=250")
    with running_cluster(num_prefill=0, engine_args=ENGINE, router_args=router_args) as cluster:
        router, decode = cluster.services["router"], cluster.services["decode-0"]
        with stopped_after_a_token(cluster) as stream:
            router.signal(signal.SIGTERM)
            while accepts_connections(cluster):
                time.sleep(0.01)
            time.sleep(0.3)
            assert router.is_alive()
            decode.signal(signal.SIGCONT)
            *_, last = stream
            assert last.choices[0].finish_reason == "length"
        assert router.wait(60) == 0
        router.argv[-1] = "--drain-grace-seconds=1"
        cluster.start_service("router")
        cluster.wait_ready(1)
        with stopped_after_a_token(cluster):
            router.signal(signal.SIGTERM)
            began = time.monotonic()
            assert router.wait(100) == 0
            assert time.monotonic() - began > 0.5


PROMPT = "a shared beginning that is long enough for several blocks " * 4


def test_a_killed_router_comes_back_to_clean_workers_and_full_index() -> None:
    with running_cluster(worker_args=SHORT_LEASES) as cluster:
        before = cluster.ask(PROMPT, 20)
        blocks = {w["id"]: w["index"]["blocks"] for w in cluster.wait_quiet()}
        assert sum(blocks.values()) > 0
        router = cluster.services["router"]
        with cluster.client() as client:
            stream = client.completions.create(
                model="dry-run", prompt="x" * 200, n=32, max_tokens=1500, stream=True, extra_body={"ignore_eos": True}
            )
            next(iter(stream))
            router.kill()
            assert not router.is_alive()
            with pytest.raises((openai.APIConnectionError, httpx.TransportError)):
                list(stream)
        cluster.start_service("router")
        cluster.wait_ready(2)
        workers = cluster.wait_quiet()  # what the dead router had open is free
        assert [w["index"]["state"] for w in workers] == ["exact"] * 2
        for worker in workers:
            assert worker["index"]["blocks"] >= blocks[worker["id"]]  # from the snapshot
        again = cluster.ask(PROMPT, 20)
        assert again.choices[0].text == before.choices[0].text
        assert again.usage is not None
        details = again.usage.prompt_tokens_details
        assert details is not None
        assert (details.cached_tokens or 0) > 100
        cluster.wait_quiet()
