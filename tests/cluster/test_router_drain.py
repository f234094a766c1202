"""SIGTERM to a router with a stream open: it ends when the stream has, or when its grace is over."""

from __future__ import annotations

import signal
import time

import openai
import pytest

from tests.cluster.harness import Cluster, running_cluster

NUM_TOKENS = 1900


def open_stream(cluster: Cluster):
    return iter(
        cluster.client().completions.create(
            model="dry-run",
            prompt="A stream that outlives its router's SIGTERM",
            max_tokens=NUM_TOKENS,
            stream=True,
            extra_body={"ignore_eos": True},
        )
    )


def test_a_stream_is_finished_before_the_router_ends() -> None:
    with running_cluster(num_prefill=0, router_args=("--drain-grace-seconds=100",)) as cluster:
        router = cluster.services["router"]
        stream = open_stream(cluster)
        next(stream)
        router.signal(signal.SIGTERM)
        time.sleep(0.3)
        with pytest.raises(openai.APIConnectionError):
            cluster.client().models.list()
        assert router.is_alive()
        *_, last = stream
        assert last.choices[0].finish_reason == "length"
        assert router.process is not None
        assert router.process.wait(10) == 0


def test_a_stream_is_cut_when_the_grace_is_over() -> None:
    with running_cluster(num_prefill=0, router_args=("--drain-grace-seconds=1",)) as cluster:
        router = cluster.services["router"]
        stream = open_stream(cluster)
        next(stream)
        cluster.services["decode-0"].signal(signal.SIGSTOP)
        try:
            router.signal(signal.SIGTERM)
            began = time.monotonic()
            assert router.process is not None
            assert router.process.wait(10) == 0
            assert 0.5 < time.monotonic() - began < 5
        finally:
            cluster.services["decode-0"].signal(signal.SIGCONT)
