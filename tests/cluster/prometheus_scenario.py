"""A cluster under load and faults with two Prometheus servers, and their observations.

Both scrape the same services: one with the job labels of our Compose file, one with those of a PodMonitor.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Collection
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import yaml

from tests.cluster.prometheus_server import Prometheus, faster_rules
from tests.harness.background_load import BackgroundLoad
from tests.harness.cluster import ROOT, Cluster, Service, free_ports, running_cluster

MONITORING = ROOT / "monitoring"
RULES = (MONITORING / "alerts.yml").read_text()
DASHBOARDS = [json.loads(path.read_text()) for path in sorted((MONITORING / "grafana" / "dashboards").glob("*.json"))]
SCHEMES = ("compose", "kubernetes")
SERVICES = ("prefill-0", "decode-0", "decode-1", "agent", "router", "router-1")
RATE_INTERVAL, RANGE = "8s", "60s"
NUM_CLIENTS = 220
QUIET_SECONDS, PATIENCE_SECONDS = 4.0, 40.0


@dataclass
class Observed:
    """Observations of each of SCHEMES; `quiet`: before load and faults."""

    values: dict[tuple[str, str], list[float]] = field(default_factory=dict)
    values_while_quiet: dict[tuple[str, str], list[float]] = field(default_factory=dict)
    fired_while_quiet: dict[str, set[str]] = field(default_factory=dict)
    fired_in_overload: dict[str, set[str]] = field(default_factory=dict)
    fired: dict[str, list[dict[str, str]]] = field(default_factory=dict)  # labels, without those of Prometheus' own
    summaries: dict[str, set[str]] = field(default_factory=dict)  # of alerts that were firing at some time
    texts: dict[str, str] = field(default_factory=dict)


def compose_scrapes(ports: dict[str, int]) -> list[dict[str, Any]]:
    """Return the Compose file's jobs with this cluster's ports and second router, without services it lacks."""
    jobs = yaml.safe_load((MONITORING / "prometheus.yml").read_text())["scrape_configs"]
    for job in jobs:
        [group] = job["static_configs"]
        names = [target.partition(":")[0] for target in group["targets"]]
        names += ["router-1"] * ("router" in names)
        group["targets"] = [f"127.0.0.1:{ports[name]}" for name in names if name in ports]
    return jobs


def kubernetes_scrapes(ports: dict[str, int]) -> list[dict[str, Any]]:
    """Return targets with the labels that the Prometheus operator gives those of a PodMonitor."""

    def target(name: str, port: int) -> dict[str, Any]:
        container = name.split("-")[0]
        labels = {
            "namespace": "inference", "job": "inference/mini-infer", "pod": name, "container": container,
            "endpoint": "metrics",
        }  # fmt: skip
        return {"targets": [f"127.0.0.1:{port}"], "labels": labels}

    groups = [target(name, port) for name, port in ports.items()]
    return [{"job_name": "podMonitor/inference/mini-infer/0", "static_configs": groups}]


def variables(server: Prometheus) -> dict[str, str]:
    """Return a dashboard's variables as Grafana fills them in: all values that each offers, or a wildcard."""
    found = {"$__rate_interval": RATE_INTERVAL, "$__range": RANGE}
    for variable in DASHBOARDS[0]["templating"]["list"]:
        if variable["type"] == "query":
            [(series, label)] = re.findall(r"label_values\((.*), (\w+)\)", variable["query"]["query"])
            values = server.label_values(re.sub(r"\$\w+", ".*", series), label)
            found[f"${variable['name']}"] = f"({'|'.join(values)})" if values else ".*"
    return found


def filled_in(expression: str, values: dict[str, str]) -> str:
    return re.sub(r"\$\w+", lambda name: values[name[0]], expression)


class Scenario:
    """A cluster whose pools are too small, two Prometheus servers, and the faults."""

    def __init__(
        self, cluster: Cluster, servers: dict[str, Prometheus], load: BackgroundLoad, expressions: Collection[str]
    ) -> None:
        self.cluster = cluster
        self.servers = servers
        self.load = load
        self.expressions = expressions
        self.seen = Observed()

    def wait_for(self, *alerts: str) -> None:
        """Wait until all servers have seen these alerts fire. Tests report those that are late."""
        deadline = time.monotonic() + PATIENCE_SECONDS
        while not all(set(alerts) <= server.fired() for server in self.servers.values()):
            if time.monotonic() > deadline:
                break
            time.sleep(0.2)
        for name, server in self.servers.items():
            self.seen.summaries.setdefault(name, set()).update(server.summaries())

    def run(self, ports: dict[str, int]) -> None:
        for server in self.servers.values():
            server.wait_for("up == 1", len(SERVICES))  # first scrapes come five seconds after the start
        time.sleep(QUIET_SECONDS)
        self.look_at_panels(self.seen.values_while_quiet)
        self.seen.fired_while_quiet = {name: server.fired() for name, server in self.servers.items()}
        self.overload()
        self.look_at_panels(self.seen.values)
        self.seen.fired_in_overload = {name: server.fired() for name, server in self.servers.items()}
        self.seen.texts = {name: httpx.get(f"http://127.0.0.1:{port}/metrics").text for name, port in ports.items()}
        self.restart_services()
        self.lose_workers()
        self.lose_routers()
        self.seen.fired = {name: server.firings() for name, server in self.servers.items()}

    def overload(self) -> None:
        self.load.level = NUM_CLIENTS
        self.wait_for("RequestsRefused", "KvCacheFull")

    def look_at_panels(self, into: dict[tuple[str, str], list[float]]) -> None:
        for scheme, server in self.servers.items():
            given = variables(server)
            for expression in self.expressions:
                samples = server.query(filled_in(expression, given))
                into[scheme, expression] = [float(sample["value"][1]) for sample in samples]

    def restart_services(self) -> None:
        """Restart services: a reader can no longer map its peer's pool, and an agent comes and goes."""
        services, self.load.level = self.cluster.services, 4  # starting takes the cores
        (self.cluster.folder / "run" / "prefill-0.kv.sock").unlink()
        services["decode-1"].kill()
        for _ in range(4):
            self.restart_agent()
        self.cluster.start_service("decode-1")
        self.cluster.wait_ready(3)
        # The last time with another size, so that workers do not connect to it again.
        self.cluster.services["agent"].argv.append("--host-tier-gb=0.0012")
        self.restart_agent()
        self.load.level = NUM_CLIENTS
        self.wait_for("ServiceDown", "RestartLoop", "KvTransferFailures")

    def restart_agent(self) -> None:
        self.cluster.services["agent"].kill()
        began = time.time()
        self.cluster.start_service("agent")
        for server in self.servers.values():
            server.wait_for(f'mini_infer_start_time_seconds{{role="agent"}} > {began}')

    def lose_workers(self) -> None:
        services = self.cluster.services
        services["prefill-0"].kill()
        self.wait_for("NoPrefillWorker", "WorkerOutOfService", "HostTierUnused", "IndexWrong", "SlowFirstToken")
        for name in ("decode-0", "decode-1"):
            services[name].kill()
        self.wait_for("NoDecodeWorker", "RequestsFailing", "RequestsMigrating")

    def lose_routers(self) -> None:
        for name in ("router", "router-1"):
            self.cluster.services[name].kill()
        self.wait_for("NoRouter")


def start_second_router(cluster: Cluster, metrics_port: int) -> None:
    """Start a router like the first, at other ports. The load does not use it."""
    [port] = free_ports(1)
    others = {"--port": port, "--metrics-port": metrics_port}
    names = [flag.partition("=")[0] for flag in cluster.services["router"].argv]
    argv = [
        f"{name}={others[name]}" if name in others else flag
        for name, flag in zip(names, cluster.services["router"].argv, strict=True)
    ]
    cluster.services["router-1"] = Service("router-1", argv, cluster.folder / "router-1.log")
    cluster.start_service("router-1")


def observe(folder: Path, expressions: Collection[str]) -> Observed:
    """Run the scenario once. `expressions` are evaluated while all services run, quiet and under load."""
    numbers = free_ports(len(SERVICES) + len(SCHEMES))
    ports = dict(zip(SERVICES, numbers, strict=False))
    own = {name: (f"--metrics-port={port}",) for name, port in ports.items()}
    role_args = {
        **own,
        "agent": (*own["agent"], "--host-tier-gb=0.0006"),  # too little to make up for small pools: see IndexWrong
        "prefill": ("--max-num-batched-tokens=128",),
        "decode": ("--kv-transport=shm", "--num-speculative-tokens=2", "--ngram-min=1", "--itl-objective-ms=1000"),
    }
    engine_args = ("--model=dry-run", "--num-gpu-blocks=192", "--num-threads=1", "--max-num-seqs=16")
    router_args = (*own["router"], "--max-queue=160", "--worker-wait-seconds=1")
    with running_cluster(
        1, 2, engine_args=engine_args, role_args=role_args, router_args=router_args, with_agent=True
    ) as cluster:
        rules, scrapes = faster_rules(RULES), (compose_scrapes(ports), kubernetes_scrapes(ports))
        servers: dict[str, Prometheus] = {}
        start_second_router(cluster, ports["router-1"])
        load = BackgroundLoad(cluster.url, NUM_CLIENTS)
        try:
            for name, port, configs in zip(SCHEMES, numbers[len(SERVICES) :], scrapes, strict=True):
                servers[name] = Prometheus(folder / name, port, configs, rules)
            for server in servers.values():
                server.wait_ready()
            scenario = Scenario(cluster, servers, load, expressions)
            scenario.run(ports)
        finally:
            load.stop()
            for server in servers.values():
                server.stop()
    return scenario.seen
