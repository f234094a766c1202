"""SIGKILL of workers under load: every answer equals the run without it, and nothing is left behind."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from mini_infer import LLM
from tests.harness.cluster import SHORT_LEASES, Cluster, running_cluster
from tests.harness.jobs import expected_texts, make_jobs, stream_jobs
from tests.harness.processes import children, until_gone
from tests.harness.waiting import wait_until
from tests.kvstore.helpers import shm_names

NUM_REQUESTS = 50  # so many that some have several tokens when their worker is killed


@pytest.fixture(scope="module")
def shared() -> Iterator[Cluster]:
    with running_cluster(num_prefill=2, num_decode=2, worker_args=SHORT_LEASES) as running:
        yield running


@pytest.mark.parametrize("kill", ["decode-0", "prefill-0"])
async def test_requests_survive_a_killed_worker(cluster: Cluster, reference: LLM, kill: str) -> None:
    jobs = make_jobs(NUM_REQUESTS, seed=1 if kill == "decode-0" else 4)  # no prompt that a cache has
    expected = expected_texts(reference, jobs)
    shm_before = shm_names()
    [engine_process] = children(cluster.services[kill].pid)
    answers = await stream_jobs(cluster.url, jobs, 15, cluster.services[kill].kill)
    assert [reasons for _, reasons in answers] == [["length"]] * NUM_REQUESTS
    wrong = [i for i, (text, _) in enumerate(answers) if text != expected[i]]
    assert not wrong, f"{len(wrong)} answers differ, first: {wrong[:5]}"
    workers = cluster.wait_quiet()
    assert len(workers) == 3
    wait_until(lambda: shm_names() <= shm_before)
    until_gone(engine_process)  # it ends by itself
    for service in cluster.services.values():
        assert "AssertionError" not in service.log(), service.log()[-2000:]
