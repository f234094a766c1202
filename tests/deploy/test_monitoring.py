"""Every metric and label that dashboards and alerts query is one that some service exports."""

import json
import re
from pathlib import Path

import pytest
import yaml

from common.metrics import SPECS
from router.metrics import WORKER_STATES

ROOT = Path(__file__).parents[2]
MONITORING = ROOT / "monitoring"
PROMETHEUS_LABELS = {"job", "instance", "le", "model_name"}
SUFFIXES = {"counter": ("_total",), "gauge": ("",), "histogram": ("_bucket", "_sum", "_count")}
EXPORTED = {spec.name + suffix: spec for spec in SPECS for suffix in SUFFIXES[spec.kind]}

ALERTS = yaml.safe_load((MONITORING / "alerts.yml").read_text())["groups"][0]["rules"]
DASHBOARD = json.loads((MONITORING / "grafana" / "dashboards" / "mini-infer.json").read_text())
PANELS = [panel for panel in DASHBOARD["panels"] if panel["type"] != "row"]
EXPRESSIONS = [(alert["alert"], alert["expr"]) for alert in ALERTS] + [
    (panel["title"], target["expr"]) for panel in PANELS for target in panel["targets"]
]


def metric_names(expression: str) -> set[str]:
    return set(re.findall(r"\b(?:vllm:|mini_infer_)[a-z0-9_]+", expression))


def label_names(expression: str) -> set[str]:
    selected = re.findall(r"[{,]\s*([a-z_]+)\s*=~?\"", expression)
    grouped = [name.strip() for group in re.findall(r"\bby \(([^)]*)\)", expression) for name in group.split(",")]
    return {*selected, *grouped}


@pytest.mark.parametrize(("where", "expression"), EXPRESSIONS)
def test_what_is_queried_is_exported(where, expression):
    names = metric_names(expression)
    assert names or "up{" in expression
    assert names <= EXPORTED.keys()
    labels = {label for name in names for label in EXPORTED[name].labels}
    assert label_names(expression) <= labels | PROMETHEUS_LABELS
    assert expression.count("(") == expression.count(")")


def test_the_reader_of_names_finds_them():
    expression = 'sum by (le, role) (rate(vllm:x_bucket{job="a", state=~"b"}[1m])) / mini_infer_y'
    assert metric_names(expression) == {"vllm:x_bucket", "mini_infer_y"}
    assert label_names(expression) == {"le", "role", "job", "state"}


def test_worker_states_in_alerts_exist():
    states = set(re.findall(r'state="([a-z-]+)"', " ".join(alert["expr"] for alert in ALERTS)))
    assert states
    assert states <= set(WORKER_STATES)


def test_every_alert_says_what_happened_and_what_to_do():
    for alert in ALERTS:
        assert set(alert["annotations"]) == {"summary", "action"}
        assert alert["labels"]["severity"] in ("page", "ticket")


def test_panels_lie_side_by_side():
    taken = set()
    for panel in DASHBOARD["panels"]:
        box = panel["gridPos"]
        cells = {(box["x"] + dx, box["y"] + dy) for dx in range(box["w"]) for dy in range(box["h"])}
        assert not taken & cells
        assert box["x"] + box["w"] <= 24
        taken |= cells
    assert len({panel["id"] for panel in DASHBOARD["panels"]}) == len(DASHBOARD["panels"])


def scraped(name):
    jobs = yaml.safe_load((MONITORING / name).read_text())["scrape_configs"]
    assert {job["job_name"] for job in jobs} == {"router", "prefill", "decode", "agent"}
    return {target.split(":")[0] for job in jobs for target in job["static_configs"][0]["targets"]}


def test_prometheus_scrapes_every_service_of_the_compose_file():
    services = yaml.safe_load((ROOT / "docker-compose.yml").read_text())["services"]
    assert scraped("prometheus.yml") == services.keys() - {"prometheus", "grafana"}


def test_on_a_gpu_prometheus_scrapes_what_is_started_there():
    assert scraped("prometheus.cuda.yml") == {"router", "agent", "prefill-0", "decode-0"}
    base, cuda = ((MONITORING / name).read_text() for name in ("prometheus.yml", "prometheus.cuda.yml"))
    for worker in ("prefill-1", "decode-1"):
        base = base.replace(f', "{worker}:9100"', "")
    assert yaml.safe_load(base) == yaml.safe_load(cuda)
