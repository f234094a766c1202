"""Debian's Prometheus against a cluster under load and faults: every panel has data, every alert fires.

Alerts keep their expressions; windows and `for` are divided by 60 (`prometheus_server.faster_rules`), and scrapes
come every second. The scenario (`prometheus_scenario.py`) runs once; the tests look at what it saw.
"""

from __future__ import annotations

import math
import re
from typing import Any

import pytest
import yaml

from common.metrics import ROUTER_SPECS, START_TIME, wing_specs
from tests.cluster.prometheus_scenario import DASHBOARDS, RATE_INTERVAL, RULES, SCHEMES, Observed, observe
from tests.cluster.prometheus_server import INSTALLED

pytestmark = [
    pytest.mark.prometheus,
    pytest.mark.skipif(not INSTALLED, reason="needs Debian's prometheus (apt-get install prometheus)"),
    pytest.mark.timeout(300),
]

ALERTS = [rule["alert"] for rule in yaml.safe_load(RULES)["groups"][0]["rules"]]
QUERIES = {
    f"{dashboard['uid']}, {panel['title']}, {target['refId']}": target["expr"]
    for dashboard in DASHBOARDS
    for panel in dashboard["panels"]
    for target in panel.get("targets", [])
}

WORKER_METRICS = (*wing_specs("worker"), *wing_specs("engine"))
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


@pytest.fixture(scope="module")
def observed(tmp_path_factory: pytest.TempPathFactory) -> Observed:
    return observe(tmp_path_factory.mktemp("prometheus"), {*QUERIES.values(), *VLLM})


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
def test_overload_alone_fires_what_is_about_load(observed: Observed, scheme: str) -> None:
    assert observed.fired_in_overload[scheme] <= {"RequestsRefused", "SlowFirstToken", "KvCacheFull", "IndexWrong"}


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("alert", ALERTS)
def test_every_alert_fires(observed: Observed, scheme: str, alert: str) -> None:
    assert alert in {labels["alertname"] for labels in observed.fired[scheme]}


@pytest.mark.parametrize(("scheme", "namespace"), [("compose", None), ("kubernetes", "inference")])
def test_alerts_say_whose_they_are(observed: Observed, scheme: str, namespace: str | None) -> None:
    firings = observed.fired[scheme]
    assert {labels.get("namespace") for labels in firings} == {namespace}
    down = {labels.get("worker") or labels["role"] for labels in firings if labels["alertname"] == "ServiceDown"}
    assert {"prefill-0", "decode-1"} <= down <= {"prefill-0", "decode-0", "decode-1", "agent", "router"}
    assert observed.summaries[scheme]
    for summary in observed.summaries[scheme]:
        assert "<no value>" not in summary
        assert "error" not in summary


@pytest.mark.parametrize(
    ("service", "specs"),
    [
        ("router", ROUTER_SPECS), ("prefill-0", WORKER_METRICS), ("decode-0", WORKER_METRICS),
        ("agent", wing_specs("kvstore")),
    ],
)  # fmt: skip
def test_each_service_exports_what_is_listed_for_it_and_nothing_else(
    observed: Observed, service: str, specs: tuple[Any, ...]
) -> None:
    types = re.findall(r"^# TYPE (\S+) (\w+)$", observed.texts[service], re.MULTILINE)
    names = {name.removesuffix("_total") if kind == "counter" else name for name, kind in types}
    assert {name for name in names if not name.endswith("_created")} == {spec.name for spec in (*specs, START_TIME)}
