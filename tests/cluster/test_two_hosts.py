"""A prefill worker on another host: a network namespace with a link, which shares no files of the run directory."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass

import pytest

from tests.harness.cluster import Cluster, Service, free_ports, running_cluster
from tests.harness.waiting import wait_until

NETWORK = f"10.{os.getpid() // 250 % 250}.{os.getpid() % 250}"
HERE, THERE = f"{NETWORK}.1", f"{NETWORK}.2"
PROMPT = list(range(30, 130))


@dataclass(frozen=True)
class OtherHost:
    """name: of the namespace. link: this side's end of the link to it."""

    name: str
    link: str

    def argv(self, hidden: str, *argv: str) -> list[str]:
        """Return a command that runs there and sees the folder `hidden` empty. It keeps the process id."""
        script = 'mount -t tmpfs -o mode=700 tmpfs "$0" && exec "$@"'
        return ["ip", "netns", "exec", self.name, "unshare", "--mount", "sh", "-c", script, hidden, *argv]


def ip(*argv: str) -> None:
    subprocess.run(["ip", *argv], check=True, capture_output=True)


@pytest.fixture
def other_host() -> Iterator[OtherHost]:
    host = OtherHost(f"mini-infer-{os.getpid()}", f"mi{os.getpid()}a")
    far = f"mi{os.getpid()}b"
    try:
        ip("netns", "add", host.name)
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("network namespaces need root")
    try:
        ip("link", "add", host.link, "type", "veth", "peer", "name", far, "netns", host.name)
        ip("addr", "add", f"{HERE}/24", "dev", host.link)
        ip("link", "set", host.link, "up")
        ip("-n", host.name, "addr", "add", f"{THERE}/24", "dev", far)
        ip("-n", host.name, "link", "set", far, "up")
        ip("-n", host.name, "link", "set", "lo", "up")
        yield host
    finally:
        ip("netns", "del", host.name)  # and the link with it


def ask(cluster: Cluster, salt: str) -> tuple[str, dict[str, object]]:
    """Return the answer, and how its decode worker got the KV. salt: separates its cached prefixes."""
    answer = cluster.ask(PROMPT, 12, cache_salt=salt)
    return answer.choices[0].text, cluster.legs_of(answer.id)[-1]


def test_kv_travels_by_tcp_between_hosts_and_a_cut_link_costs_time_only(
    other_host: OtherHost, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MINI_INFER_CLUSTER_TOKEN", "a secret of both hosts")
    [port] = free_ports(1)
    engine_args = ["--model=dry-run", "--num-gpu-blocks=512", "--num-threads=1"]
    with running_cluster(0, 1, engine_args=engine_args, router_args=[f"--prefill={THERE}:{port}"]) as cluster:
        alone, found = ask(cluster, "here")
        assert found["transport"] is None
        run_dir = cluster.folder / "run"
        program = other_host.argv(str(run_dir), sys.executable, "-m")
        worker = ["prefill_service", f"--host={THERE}", f"--port={port}", f"--run-dir={run_dir}", "--worker-id=far"]
        cluster.services["far"] = Service("far", [*worker, *engine_args], cluster.folder / "far.log", program)
        cluster.start_service("far")
        cluster.wait_ready(2)
        text, found = ask(cluster, "far")
        assert (found["transport"], found["kv_pull_failed"], found["pulled_tokens"]) == ("tcp", False, len(PROMPT))
        assert text == alone
        ip("link", "set", other_host.link, "down")
        assert ask(cluster, "cut")[0] == alone
        ip("link", "set", other_host.link, "up")
        wait_until(lambda: ask(cluster, f"mended at {time.monotonic()}")[1]["transport"] == "tcp")
        cluster.wait_quiet()
