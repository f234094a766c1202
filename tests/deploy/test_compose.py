"""`docker compose up` for real, and chat requests through it. Run by `make test-compose`; takes some minutes.

The cluster alone is started (`up router` brings up the router and all it depends on): images of Prometheus and
Grafana come from a registry, which a test must not need. Their files are tested in test_monitoring.py.
"""

from __future__ import annotations

import json
import time
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest

from cli.ports import free_ports
from tests.deploy.docker_engine import IMAGE, Docker, build_image, docker_engine

pytestmark = [pytest.mark.compose, pytest.mark.timeout(3000)]

WORKERS = ("prefill-0", "prefill-1", "decode-0", "decode-1")
QUESTION = "What is the capital of France?"
# Long enough that the router sends it to a prefill worker.
SYSTEM = "You answer questions about countries, rivers, mountains and cities. " * 12 + "Be brief."


class Cluster:
    def __init__(self, docker: Docker, url: str) -> None:
        self.docker = docker
        self.url = url

    def chat(self, system: str = SYSTEM) -> dict:
        messages = [{"role": "system", "content": system}, {"role": "user", "content": QUESTION}]
        body = {"model": "SmolLM2-135M-Instruct", "messages": messages, "max_tokens": 24, "temperature": 0}
        reply = httpx.post(f"{self.url}/v1/chat/completions", json=body, timeout=60.0)
        assert reply.status_code == 200, reply.text
        return reply.json()

    def logs(self, *services: str) -> str:
        return self.docker.compose("logs", "--no-color", *services).stdout


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory):
    scratch = tmp_path_factory.mktemp("docker")
    (port,) = free_ports(1)
    settings = {"MINI_INFER_IMAGE": IMAGE, "MINI_INFER_PUBLISH": str(port), "COMPOSE_PROJECT_NAME": "mini-infer-test"}
    with docker_engine(scratch, settings) as docker:
        build_image(docker, scratch)
        try:
            docker.compose("up", "--no-build", "--wait", "--wait-timeout", "300", "-d", "router")
            yield Cluster(docker, f"http://127.0.0.1:{port}")
        finally:
            docker.compose("down", "-v", "--timeout", "5")


def test_a_chat_request_is_answered_and_its_kv_travels_by_descriptor(cluster):
    answer = cluster.chat()
    assert "Paris" in answer["choices"][0]["message"]["content"]
    assert answer["choices"][0]["finish_reason"] == "stop"
    assert cluster.chat()["choices"][0]["message"] == answer["choices"][0]["message"]
    # The decode worker read the pool of a prefill worker of another container.
    assert "is read by shm" in cluster.logs("decode-0", "decode-1")


def test_compose_merges_the_file_for_gpus(cluster):
    files = ("-f", "docker-compose.yml", "-f", "docker-compose.cuda.yml")
    services = json.loads(cluster.docker.compose(*files, "config", "--format", "json").stdout)["services"]
    assert services.keys() == {"agent", "prefill-0", "decode-0", "router", "prometheus", "grafana"}
    assert services["router"]["depends_on"].keys() == {"prefill-0", "decode-0"}
    for name in ("prefill-0", "decode-0"):
        environment = services[name]["environment"]
        assert environment["MINI_INFER_GPU_MEMORY_FRACTION"] == "0.45"
        assert environment["MINI_INFER_KV_CACHE_GB"] == "0"
        assert environment["MINI_INFER_PORT"] == "9000"
        assert {mount["target"] for mount in services[name]["volumes"]} == {
            "/run/mini-infer", "/var/cache/mini-infer"
        }  # fmt: skip
    (first, *_) = services["prometheus"]["volumes"]
    assert first["source"].endswith("prometheus.cuda.yml")


def test_workers_share_the_cores(cluster):
    """While one computes, the others' kernel shows its lock on the file that they have in common."""
    program = (
        "import fcntl, os, sys, time; from worker.cores import SharedCores; from pathlib import Path\n"
        "cores = SharedCores(Path('/run/mini-infer/cores'), 4); end = time.monotonic() + 20\n"
        "while (found := cores.share()) == 4 and time.monotonic() < end: time.sleep(0.001)\n"
        "print(found)"
    )
    with ThreadPoolExecutor(1) as pool:
        shares = pool.submit(cluster.docker.compose, "exec", "-T", "decode-0", "python", "-c", program)
        while not shares.done():
            cluster.chat(f"{time.monotonic()} {SYSTEM}")
    assert shares.result().stdout.strip() in ("1", "2")


def test_all_workers_are_attached(cluster):
    workers = httpx.get(f"{cluster.url}/v1/cluster", timeout=10.0).json()
    text = json.dumps(workers)
    assert all(name in text for name in WORKERS)


def test_metrics_of_every_service_can_be_scraped(cluster):
    assert "vllm:time_to_first_token_seconds" in httpx.get(f"{cluster.url}/metrics", timeout=10.0).text
    program = "import sys, urllib.request as u; sys.stdout.write(u.urlopen(sys.argv[1]).read().decode())"
    for service in WORKERS:
        text = cluster.docker.compose(
            "exec", "-T", "router", "python", "-c", program, f"http://{service}:9100/metrics"
        ).stdout
        assert "vllm:kv_cache_usage_perc" in text


def test_the_cluster_answers_without_one_worker_of_each_role(cluster):
    cluster.docker.compose("kill", "decode-0", "prefill-1")
    for number in range(4):
        assert cluster.chat(f"{number}. {SYSTEM}")["choices"][0]["message"]["content"]


def test_sigterm_ends_every_service_well(cluster):
    """Last: stops the cluster. Exit code 0 means that the service drained and ended by itself."""
    cluster.docker.compose("start", "decode-0", "prefill-1")
    cluster.docker.compose("stop", "--timeout", "40")
    ids = cluster.docker.compose("ps", "-aq").stdout.split()
    assert len(ids) == 6
    template = '{{index .Config.Labels "com.docker.compose.service"}} {{.State.ExitCode}}'
    codes = cluster.docker.run("inspect", "--format", template, *ids).stdout.split("\n")
    assert sorted(filter(None, codes)) == sorted(f"{name} 0" for name in (*WORKERS, "router", "agent"))
