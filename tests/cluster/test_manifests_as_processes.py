"""The containers of k8s/ as processes of this machine: KV transfers between pods, and the start order.

Arguments and variables are those of the manifests. Replaced are what a node gives (names, addresses, volumes), ports,
and the model.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.deploy.kubernetes.kustomize import Document, Rendered
from tests.harness.clients import get
from tests.harness.cluster import ROOT, Cluster, Service, free_ports

pytestmark = pytest.mark.skipif(not shutil.which("kubectl"), reason="kubectl builds overlays")
SOCKETS = "/run/mini-infer"
PROMPT = "a prompt that is long enough for a prefill worker to compute it " * 3


class Node:
    """Starts containers of `rendered` as processes, with folders in place of volumes."""

    def __init__(self, rendered: Rendered, folder: Path) -> None:
        self._rendered, self.folder = rendered, folder
        services = rendered.services()
        ports = free_ports(2 * len(services))
        self.names = {container["name"]: workload for workload, container in services}
        self.ports = dict(zip(self.names, ports, strict=False))
        self.metrics_ports = dict(zip(self.names, ports[len(services) :], strict=True))
        self.cluster = Cluster(folder, f"http://127.0.0.1:{self.ports['router']}")

    def container(self, name: str) -> Document:
        return next(c for _, c in self._rendered.services() if c["name"] == name)

    def env(self, name: str, container: Document) -> dict[str, str]:
        env = self._rendered.environment(container)
        if env.get("MINI_INFER_WORKER_ID") == "from-the-pod":
            env["MINI_INFER_WORKER_ID"] = f"{name}-0"
        temporary = self.folder / f"tmp-{self.names[name]}"
        temporary.mkdir(exist_ok=True)
        own = {
            "MINI_INFER_HOST": "127.0.0.1",
            "MINI_INFER_ADVERTISE_HOST": "127.0.0.1",
            "MINI_INFER_PORT": str(self.ports[name]),
            "MINI_INFER_METRICS_PORT": str(self.metrics_ports[name]),
            "MINI_INFER_MODEL": "dry-run",
            "MINI_INFER_KV_CACHE_GB": "0.05",
            "MINI_INFER_NUM_THREADS": "1",
            "TMPDIR": str(temporary),
        }
        return dict(os.environ) | {key: self._mapped(name, value) for key, value in env.items()} | own

    def arguments(self, name: str, container: Document) -> list[str]:
        argv = [self._mapped(name, text) for text in self._rendered.arguments(container)]
        for role in ("prefill", "decode"):
            argv = [re.sub(rf"^--{role}=.*", f"--{role}=127.0.0.1:{self.ports[role]}", text) for text in argv]
        return argv

    def start(self, name: str) -> Service:
        container = self.container(name)
        service = Service(name, self.arguments(name, container), self.folder / f"{name}.log")
        self.cluster.services[name] = service
        service.start(self.env(name, container))
        return service

    def prepare(self, name: str) -> subprocess.Popen[str]:
        """Start the container that goes before `name`."""
        (container,) = self._rendered.pod(self.names[name])["initContainers"]
        command = [sys.executable, "-m", *self.arguments(name, container)]
        return subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, text=True)

    def _mapped(self, name: str, text: str) -> str:
        """Substitute the folder that stands for the socket volume of this container's pod."""
        workload = self.names[name]
        volumes = [v for v in self._rendered.pod(workload).get("volumes", []) if v["name"] == "sockets"]
        if not volumes:
            return text
        is_host = "hostPath" in volumes[0]
        folder = self.folder / ("host" if is_host else f"pod-{workload}")
        if not folder.exists():
            folder.mkdir()
            folder.chmod(0o700 if is_host else 0o2777)  # as own-sockets leaves it; as the kubelet makes an emptyDir
        return text.replace(SOCKETS, str(folder))

    def kv_transfers(self) -> dict[str, float]:
        """Return the decode worker's pulls by transport."""
        text = get(f"http://127.0.0.1:{self.metrics_ports['decode']}/metrics").text
        found = re.findall(r'^mini_infer_kv_transfers_total\{.*?transport="(\w+)".*?\} (\S+)$', text, re.M)
        return {transport: float(count) for transport, count in found}


@contextlib.contextmanager
def node(variant: str) -> Iterator[Node]:
    with tempfile.TemporaryDirectory(prefix="mi-", ignore_cleanup_errors=True) as folder:
        made = Node(Rendered(variant), Path(folder))
        try:
            yield made
        finally:
            made.cluster.stop()


def ask(made: Node) -> None:
    made.start("router")
    made.cluster.wait_ready(2)
    usage = made.cluster.ask(PROMPT, 5).usage
    assert usage is not None
    assert usage.completion_tokens == 5


@pytest.mark.parametrize(("variant", "transport"), [("small", "tcp"), ("shared-pod", "shm")])
def test_kv_travels_between_pods_by_tcp_and_within_one_by_descriptor(variant: str, transport: str) -> None:
    with node(variant) as made:
        for role in ("prefill", "decode"):
            made.start(role)
        ask(made)
        pulled = {name for name, count in made.kv_transfers().items() if count}
        assert pulled == {transport}


def test_workers_wait_for_the_agent_of_their_node_and_use_it() -> None:
    with node("node-agent") as made:
        waiting = {role: made.prepare(role) for role in ("prefill", "decode")}
        for process in waiting.values():
            assert process.stderr is not None
            assert any("waiting up to 120 s for" in line for line in process.stderr)
        time.sleep(1.0)
        assert {process.poll() for process in waiting.values()} == {None}
        made.start("kv-agent")
        for role, process in waiting.items():
            process.communicate(timeout=200)
            assert process.returncode == 0
            made.start(role)
        ask(made)
        assert {name for name, count in made.kv_transfers().items() if count} == {"shm"}
        assert num_connections(made.folder / "host" / "agent.sock") == 2


def num_connections(path: Path) -> int:
    """Return the number of connections that a Unix socket's server has accepted."""
    connected = "03"
    rows = [line.split() for line in Path("/proc/net/unix").read_text().splitlines()]
    return sum(1 for row in rows if row[-1] == str(path) and row[5] == connected)
