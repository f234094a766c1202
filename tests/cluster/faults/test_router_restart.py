"""SIGKILL of the router under load: only its open streams break; the next one finds the workers as they are."""

from __future__ import annotations

import httpx
import openai
import pytest

from tests.harness.cluster import SHORT_LEASES, running_cluster

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
