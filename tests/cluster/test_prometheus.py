"""Debian's Prometheus against a cluster under load and faults: every panel has data, every alert fires.

Two servers scrape the same cluster, one with the job labels of our Compose file, one with those of a PodMonitor.
Alerts keep their expressions; windows and `for` are divided by 60 (`prometheus_server.faster_rules`), and scrapes
come every second. Everything is observed in one run of the scenario; the tests below it look at what it saw.
"""

from __future__ import annotations

import json
import math
import re
import time
from dataclasses import dataclass, field
from typing import Any

import httpx
import pytest
import yaml

from common.metrics import AGENT_SPECS, ROUTER_SPECS, START_TIME, WORKER_SPECS
from tests.cluster.background_load import BackgroundLoad
from tests.cluster.harness import ROOT, Cluster, Service, free_ports, running_cluster
from tests.cluster.prometheus_server import INSTALLED, Prometheus, faster_rules

pytestmark = [
    pytest.mark.skipif(not INSTALLED, reason="needs Debian's prometheus (apt-get install prometheus)"),
    pytest.mark.timeout(300),
]

MONITORING = ROOT / "monitoring"
RULES = (MONITORING / "alerts.yml").read_text()
ALERTS = [rule["alert"] for rule in yaml.safe_load(RULES)["groups"][0]["rules"]]
DASHBOARDS = [json.loads(path.read_text()) for path in sorted((MONITORING / "grafana" / "dashboards").glob("*.json"))]
QUERIES = {
    f"{dashboard['uid']}, {panel['title']}, {target['refId']}": target["expr"]
    for dashboard in DASHBOARDS
    for panel in dashboard["panels"]
    for target in panel.get("targets", [])
}
SCHEMES = ("compose", "kubernetes")
SERVICES = ("prefill-0", "decode-0", "decode-1", "agent", "router", "router-1")
RATE_INTERVAL, RANGE = "8s", "60s"
NUM_CLIENTS = 160
QUIET_SECONDS, PATIENCE_SECONDS = 4.0, 40.0

# What the twelve panels of vLLM's dashboard (examples/observability/prometheus_grafana) ask for, by metric and label.
_OF_MODEL = '{model_name="dry-run"}'
_LATENCIES = ("e2e_request_latency", "inter_token_latency", "time_to_first_token")
_SUMS = ("request_queue_time_seconds", "request_prefill_time_seconds", "request_decode_time_seconds")
VLLM = [
    *(
        f"histogram_quantile({share}, sum by(le) (rate(vllm:{name}_seconds_bucket{_OF_MODEL}[{RATE_INTERVAL}])))"
        for name in _LATENCIES
        for share in (0.5, 0.99)
    ),
    *(
        f"rate(vllm:{name}_seconds_sum{_OF_MODEL}[{RATE_INTERVAL}])"
        f" / rate(vllm:{name}_seconds_count{_OF_MODEL}[{RATE_INTERVAL}])"
        for name in _LATENCIES
    ),
    *(f"rate(vllm:{name}_tokens_total{_OF_MODEL}[{RATE_INTERVAL}])" for name in ("prompt", "generation")),
    *(f"vllm:{name}{_OF_MODEL}" for name in ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc")),
    *(
        f"sum by(le) (increase(vllm:request_{name}_tokens_bucket{_OF_MODEL}[{RATE_INTERVAL}]))"
        for name in ("prompt", "generation")
    ),
    f"sum by(finished_reason) (increase(vllm:request_success_total{_OF_MODEL}[{RATE_INTERVAL}]))",
    *(f"rate(vllm:{name}_sum{_OF_MODEL}[{RATE_INTERVAL}])" for name in (*_SUMS, "request_max_num_generation_tokens")),
]


@dataclass
class Observed:
    """What was seen by each of SCHEMES; `quiet`: before load and faults."""

    values: dict[tuple[str, str], list[float]] = field(default_factory=dict)
    values_while_quiet: dict[tuple[str, str], list[float]] = field(default_factory=dict)
    fired_while_quiet: dict[str, set[str]] = field(default_factory=dict)
    fired: dict[str, set[str]] = field(default_factory=dict)
    texts: dict[str, str] = field(default_factory=dict)


def compose_scrapes(ports: dict[str, int]) -> list[dict[str, Any]]:
    """The Compose file's jobs, at this cluster's ports, with its second router and without what it lacks."""
    jobs = yaml.safe_load((MONITORING / "prometheus.yml").read_text())["scrape_configs"]
    for job in jobs:
        [group] = job["static_configs"]
        names = [target.partition(":")[0] for target in group["targets"]]
        names += ["router-1"] * ("router" in names)
        group["targets"] = [f"127.0.0.1:{ports[name]}" for name in names if name in ports]
    return jobs


def kubernetes_scrapes(ports: dict[str, int]) -> list[dict[str, Any]]:
    """Targets with the labels that the Prometheus operator gives those of a PodMonitor."""

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
    """Values of a dashboard's variables as Grafana fills them in: all that each offers, or anything."""
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
    """A cluster whose pools are too small, two Prometheus servers, and what is done to them."""

    def __init__(self, cluster: Cluster, servers: dict[str, Prometheus], load: BackgroundLoad) -> None:
        self.cluster = cluster
        self.servers = servers
        self.load = load
        self.seen = Observed()

    def wait_for(self, *alerts: str) -> None:
        """Until all servers have seen these alerts fire. What is late is for the tests to say."""
        deadline = time.monotonic() + PATIENCE_SECONDS
        while not all(set(alerts) <= server.fired() for server in self.servers.values()):
            if time.monotonic() > deadline:
                return
            time.sleep(0.2)

    def run(self, ports: dict[str, int]) -> None:
        for server in self.servers.values():
            server.wait_scraped(len(SERVICES))
        time.sleep(QUIET_SECONDS)
        self.look_at_panels(self.seen.values_while_quiet)
        self.seen.fired_while_quiet = {name: server.fired() for name, server in self.servers.items()}
        self.overload()
        self.look_at_panels(self.seen.values)
        self.seen.texts = {name: httpx.get(f"http://127.0.0.1:{port}/metrics").text for name, port in ports.items()}
        self.restart_services()
        self.lose_workers()
        self.lose_routers()
        self.seen.fired = {name: server.fired() for name, server in self.servers.items()}

    def overload(self) -> None:
        self.load.level = NUM_CLIENTS
        self.wait_for("RequestsRefused", "KvCacheFull")

    def look_at_panels(self, into: dict[tuple[str, str], list[float]]) -> None:
        for scheme, server in self.servers.items():
            given = variables(server)
            for expression in {*QUERIES.values(), *VLLM}:
                samples = server.query(filled_in(expression, given))
                into[scheme, expression] = [float(sample["value"][1]) for sample in samples]

    def restart_services(self) -> None:
        """A reader that cannot map its peer's pool any more, and an agent that comes and goes."""
        services, self.load.level = self.cluster.services, 4  # starting takes the cores
        (self.cluster.folder / "run" / "prefill-0.kv.sock").unlink()
        services["decode-1"].kill()
        for _ in range(2):
            self.restart_agent()
        self.cluster.start_service("decode-1")
        self.cluster.wait_ready(3)
        self.restart_agent()  # the last time, with all workers connected to the one before
        self.load.level = NUM_CLIENTS
        self.wait_for("ServiceDown", "RestartLoop", "KvTransferFailures")

    def restart_agent(self) -> None:
        self.cluster.services["agent"].kill()
        self.cluster.start_service("agent")
        time.sleep(2.5)  # until it has been scraped

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
    """As the first one, at other ports. The load does not ask it."""
    [port] = free_ports(1)
    others = {"--port": port, "--metrics-port": metrics_port}
    names = [flag.partition("=")[0] for flag in cluster.services["router"].argv]
    argv = [
        f"{name}={others[name]}" if name in others else flag
        for name, flag in zip(names, cluster.services["router"].argv, strict=True)
    ]
    cluster.services["router-1"] = Service("router-1", argv, cluster.folder / "router-1.log")
    cluster.start_service("router-1")


@pytest.fixture(scope="module")
def observed(tmp_path_factory: pytest.TempPathFactory) -> Observed:
    numbers = free_ports(len(SERVICES) + len(SCHEMES))
    ports = dict(zip(SERVICES, numbers, strict=False))
    own = {name: (f"--metrics-port={port}",) for name, port in ports.items()}
    role_args = {
        **own,
        "agent": (*own["agent"], "--host-tier-gb=0.0006"),  # too little to make up for small pools: see IndexWrong
        "prefill": ("--max-num-batched-tokens=128",),
        "decode": ("--kv-transport=shm", "--num-speculative-tokens=2", "--ngram-min=1"),
    }
    engine_args = ("--model=dry-run", "--num-gpu-blocks=192", "--num-threads=1", "--max-num-seqs=16")
    router_args = (*own["router"], "--max-queue=96", "--worker-wait-seconds=1")
    folder = tmp_path_factory.mktemp("prometheus")
    with running_cluster(
        1, 2, engine_args=engine_args, role_args=role_args, router_args=router_args, with_agent=True
    ) as cluster:
        rules, scrapes = faster_rules(RULES), (compose_scrapes(ports), kubernetes_scrapes(ports))
        servers: dict[str, Prometheus] = {}
        load = BackgroundLoad(cluster.url, NUM_CLIENTS)
        start_second_router(cluster, ports["router-1"])
        try:
            for name, port, configs in zip(SCHEMES, numbers[len(SERVICES) :], scrapes, strict=True):
                servers[name] = Prometheus(folder / name, port, configs, rules)
            for server in servers.values():
                server.wait_ready()
            scenario = Scenario(cluster, servers, load)
            scenario.run(ports)
        finally:
            load.stop()
            for server in servers.values():
                server.stop()
    return scenario.seen


def test_rules_are_made_faster_and_nothing_else() -> None:
    text = 'x: rate(a{b="[5m]"}[5m]) > 5 [1h]\nfor: 2m\nfor: 30s\nuse 10m'
    assert faster_rules(text) == 'x: rate(a{b="[5s]"}[5s]) > 5 [60s]\nfor: 2s\nfor: 1s\nuse 10m'


@pytest.mark.parametrize("scheme", SCHEMES)
def test_every_panel_has_data(observed: Observed, scheme: str) -> None:
    empty = [
        where
        for where, expression in QUERIES.items()
        if not any(math.isfinite(value) for value in observed.values[scheme, expression])
    ]
    assert empty == []


@pytest.mark.parametrize("scheme", SCHEMES)
def test_two_routers_do_not_multiply_workers(observed: Observed, scheme: str) -> None:
    def shown(panel: str) -> list[float]:
        return observed.values_while_quiet[scheme, QUERIES[f"mini-infer, {panel}, A"]]

    assert (shown("Decode workers"), shown("Prefill workers")) == ([2.0], [1.0])
    assert sorted(shown("Workers by state")) == [1.0, 2.0]


@pytest.mark.parametrize("scheme", SCHEMES)
def test_panels_of_vllms_dashboard_have_data(observed: Observed, scheme: str) -> None:
    empty = [e for e in VLLM if not any(math.isfinite(value) for value in observed.values[scheme, e])]
    assert empty == []


@pytest.mark.parametrize("scheme", SCHEMES)
def test_no_alert_fires_while_nothing_happens(observed: Observed, scheme: str) -> None:
    assert observed.fired_while_quiet[scheme] == set()


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("alert", ALERTS)
def test_every_alert_fires(observed: Observed, scheme: str, alert: str) -> None:
    assert alert in observed.fired[scheme]


@pytest.mark.parametrize(
    ("service", "specs"),
    [
        ("router", ROUTER_SPECS), ("prefill-0", WORKER_SPECS), ("decode-0", WORKER_SPECS), ("agent", AGENT_SPECS),
    ],
)  # fmt: skip
def test_each_service_exports_what_is_listed_for_it_and_nothing_else(
    observed: Observed, service: str, specs: tuple[Any, ...]
) -> None:
    types = re.findall(r"^# TYPE (\S+) (\w+)$", observed.texts[service], re.MULTILINE)
    names = {name.removesuffix("_total") if kind == "counter" else name for name, kind in types}
    assert {name for name in names if not name.endswith("_created")} == {spec.name for spec in (*specs, START_TIME)}
