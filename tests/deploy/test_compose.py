"""`docker compose up` for real, and chat requests through it. Run by `make test-compose`; takes some minutes.

The cluster alone is started (`up router` brings up the router and all it depends on): images of Prometheus and
Grafana come from a registry, which a test must not need. Their files are tested in test_monitoring.py.
"""

from __future__ import annotations

import functools
import json
import os
import shutil
import time
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest

from cli.cluster.ports import free_ports
from tests.cluster.test_served_models import save_tiny_model
from tests.deploy.docker_engine import IMAGE, ROOT, Docker, build_image, docker_engine

pytestmark = [pytest.mark.compose, pytest.mark.timeout(3000)]

# Of this run alone, where an engine is there that others use.
PROJECT, HUB_PROJECT = f"mini-infer-test-{os.getpid()}", f"mini-infer-hub-{os.getpid()}"
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
    settings = {"MINI_INFER_IMAGE": IMAGE, "MINI_INFER_PUBLISH": str(port), "COMPOSE_PROJECT_NAME": PROJECT}
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


@pytest.mark.parametrize("profile", ["", "disaggregated"])
def test_compose_merges_the_file_for_gpus(cluster, profile):
    files = ("-f", "docker-compose.yml", "-f", "docker-compose.cuda.yml")
    settings = {"COMPOSE_PROFILES": profile, "MINI_INFER_PREFILL": "prefill-0:9000" if profile else ""}
    config = cluster.docker.compose(*files, "config", "--format", "json", **settings).stdout
    services = json.loads(config)["services"]
    workers = {"decode-0", "prefill-0"} if profile else {"decode-0"}
    assert services.keys() == {"agent", "router", "prometheus", "grafana", *workers}
    assert services["router"]["depends_on"].keys() == {"decode-0"}
    assert services["router"]["environment"]["MINI_INFER_PREFILL"] == settings["MINI_INFER_PREFILL"]
    assert services["agent"]["build"]["target"] == "cuda"
    assert services["agent"]["build"]["args"]["TORCH_INDEX_URL"] == ""
    for name in workers:
        environment = services[name]["environment"]
        assert environment["MINI_INFER_GPU_MEMORY_FRACTION"] == "0.9"
        assert environment["MINI_INFER_KV_CACHE_GB"] == "0"
        assert environment["MINI_INFER_PORT"] == "9000"
    (first, *_) = services["prometheus"]["volumes"]
    assert first["source"].endswith("prometheus.cuda.yml")


def test_workers_share_the_cores(cluster):
    """While one computes, the others' kernel shows its lock on the file that they have in common."""
    program = (
        "import fcntl, os, sys, time; from worker.cores.shared_cores import SharedCores; from pathlib import Path\n"
        "cores = SharedCores(Path('/run/mini-infer/cores'), 4); end = time.monotonic() + 100\n"
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
    cluster.docker.compose("up", "--no-build", "--wait", "--wait-timeout", "300", "-d", "router")  # both again
    cluster.docker.compose("stop", "--timeout", "40")
    ids = cluster.docker.compose("ps", "-aq").stdout.split()
    assert len(ids) == 6
    template = '{{index .Config.Labels "com.docker.compose.service"}} {{.State.ExitCode}}'
    codes = cluster.docker.run("inspect", "--format", template, *ids).stdout.split("\n")
    assert sorted(filter(None, codes)) == sorted(f"{name} 0" for name in (*WORKERS, "router", "agent"))


HUB = """
services:
  hub:
    image: ${MINI_INFER_IMAGE}
    entrypoint: [python, /hub/fake_hub.py, org/tiny, /hub/model, "8080", hf_secret]
    volumes: ["%s:/hub:ro"]
"""


def test_a_hub_id_is_downloaded_into_the_volume_that_all_services_share(cluster, tmp_path):
    """After the cluster's last test: its services start again, with another model and another volume."""
    save_tiny_model(tmp_path / "model")
    shutil.copy(ROOT / "tests/common/fake_hub.py", tmp_path)
    (tmp_path / "hub.yml").write_text(HUB % tmp_path)
    for path in (tmp_path, *tmp_path.rglob("*")):
        path.chmod(0o755)  # for the user of the containers
    settings = {"COMPOSE_PROJECT_NAME": HUB_PROJECT, "MINI_INFER_MODEL": "org/tiny"}
    settings |= {"HF_TOKEN": "hf_secret", "HF_ENDPOINT": "http://hub:8080"}
    compose = functools.partial(cluster.docker.compose, "-f", "docker-compose.yml", "-f", str(tmp_path / "hub.yml"))
    try:
        compose("up", "--no-build", "-d", "hub", **settings)
        compose("up", "--no-build", "--wait", "--wait-timeout", "300", "-d", "router", **settings)
        models = httpx.get(f"{cluster.url}/v1/models", timeout=10.0).json()
        assert [model["id"] for model in models["data"]] == ["org/tiny"]
        body = {"prompt": "once upon a time", "max_tokens": 4, "ignore_eos": True}
        answer = httpx.post(f"{cluster.url}/v1/completions", json=body, timeout=60.0).json()
        assert answer["usage"]["completion_tokens"] == 4

        # Without the volume, in a container whose file system is read-only, the error names what to do.
        run = ["run", "--rm", "--read-only", "--network", f"{HUB_PROJECT}_default", "-e", "HF_TOKEN=hf_secret"]
        run += ["-e", "HF_ENDPOINT=http://hub:8080", IMAGE, "router", "--model=org/tiny", "--decode=localhost:1"]
        refused = cluster.docker.run(*run, check=False)
        assert refused.returncode == 1
        assert (
            "cannot keep org/tiny in /var/cache/mini-infer/huggingface/hub: Read-only file system" in refused.stderr
        )
        assert "Mount a volume there" in refused.stderr
    finally:
        compose("down", "-v", "--timeout", "5", **settings)
