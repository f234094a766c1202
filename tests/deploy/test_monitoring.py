"""Every metric and label that dashboards and alerts query is one that some service exports; no query needs a job."""

import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml

from common.metrics import SPECS, wing_specs
from monitoring.dashboards.__main__ import FOLDER, dashboards
from monitoring.dashboards.board import VARIABLES
from router.metrics import WORKER_STATES

ROOT = Path(__file__).parents[2]
MONITORING = ROOT / "monitoring"
RUNBOOKS = ROOT / "docs" / "operating.md"
COMMON_LABELS = {"le", "model_name", "role", "worker", "namespace"}
OF_A_TARGET = {"job", "instance"}  # alerts may join on them, but not query a value
SUFFIXES = {"counter": ("_total",), "gauge": ("",), "histogram": ("_bucket", "_sum", "_count")}
ALL_SPECS = (*SPECS, *wing_specs("worker"), *wing_specs("engine"), *wing_specs("kvstore"))
EXPORTED = {spec.name + suffix: spec for spec in ALL_SPECS for suffix in SUFFIXES[spec.kind]}

ALERTS = yaml.safe_load((MONITORING / "alerts.yml").read_text())["groups"][0]["rules"]
DASHBOARDS = {path.stem: json.loads(path.read_text()) for path in sorted(FOLDER.glob("*.json"))}
PANELS = [
    (f"{name}: {panel['title']}", panel)
    for name, dashboard in DASHBOARDS.items()
    for panel in dashboard["panels"]
    if panel["type"] != "row"
]
EXPRESSIONS = [(alert["alert"], alert["expr"]) for alert in ALERTS] + [
    (where, target["expr"]) for where, panel in PANELS for target in panel["targets"]
]


def metric_names(expression: str) -> set[str]:
    return set(re.findall(r"\b(?:vllm:|mini_infer_)[a-z0-9_]+", expression))


def selected_labels(expression: str) -> set[str]:
    return set(re.findall(r"[{,]\s*([a-z_]+)\s*(?:=~|!~|!=|=)\"", expression))


def grouped_labels(expression: str) -> set[str]:
    groups = re.findall(r"\b(?:by|on) \(([^)]*)\)", expression)
    return {name.strip() for group in groups for name in group.split(",")}


@pytest.mark.parametrize(("where", "expression"), EXPRESSIONS)
def test_what_is_queried_is_exported(where, expression):
    names = metric_names(expression)
    assert names or expression.startswith("count(ALERTS{")
    assert names <= EXPORTED.keys()
    labels = {label for name in names for label in EXPORTED[name].labels} | COMMON_LABELS
    assert selected_labels(expression) <= labels | {"alertstate", "part_of"}
    assert grouped_labels(expression) <= labels | (OF_A_TARGET if where in NAMES else set())


NAMES = {alert["alert"] for alert in ALERTS}


def test_worker_states_in_alerts_exist():
    found = re.findall(r'[ {]state=~?"([a-z_|]+)"', " ".join(alert["expr"] for alert in ALERTS))
    states = {state for group in found for state in group.split("|")}
    assert {"ready", "refused"} <= states <= set(WORKER_STATES)


def test_every_alert_says_what_happened_what_to_do_and_where_to_read_on():
    headings = re.findall(r"^### (\w+)$", RUNBOOKS.read_text().partition("## Alerts")[2], re.MULTILINE)
    assert headings == [alert["alert"] for alert in ALERTS]
    for alert in ALERTS:
        assert set(alert["annotations"]) == {"summary", "action", "runbook_url"}
        assert alert["annotations"]["runbook_url"] == f"docs/operating.md#{alert['alert'].lower()}"
        assert alert["labels"]["severity"] in ("page", "ticket")
        assert alert["labels"]["part_of"] == "mini-infer"  # by which dashboards find it


@pytest.mark.skipif(shutil.which("promtool") is None, reason="needs Debian's prometheus")
def test_promtool_accepts_the_rules():
    done = subprocess.run(["promtool", "check", "rules", MONITORING / "alerts.yml"], capture_output=True, check=False)
    assert done.returncode == 0, done.stderr


def test_the_files_are_what_the_code_builds():
    built = dashboards()
    assert set(built) == set(FOLDER.glob("*.json"))
    for path, text in built.items():
        assert path.read_text() == text, f"{path.name} is not what monitoring/dashboards builds: make dashboards"


def test_a_dashboard_keeps_its_address_and_has_the_variables():
    assert {name: dashboard["uid"] for name, dashboard in DASHBOARDS.items()} == {
        "mini-infer": "mini-infer", "mini-infer-kv": "mini-infer-kv", "mini-infer-engine": "mini-infer-engine",
    }  # fmt: skip
    for dashboard in DASHBOARDS.values():
        assert [variable["name"] for variable in dashboard["templating"]["list"]] == ["datasource", *VARIABLES]
        assert "ALERTS" in dashboard["annotations"]["list"][0]["expr"]


@pytest.mark.parametrize(("where", "panel"), PANELS, ids=[where for where, _ in PANELS])
def test_every_panel_says_what_it_shows(where, panel):
    assert panel["description"].endswith(".")
    assert panel["targets"]
    defaults = panel["fieldConfig"]["defaults"] if "fieldConfig" in panel else {}
    columns = [override["properties"] for override in panel.get("fieldConfig", {}).get("overrides", [])]
    heat_unit = panel["options"].get("yAxis", {}).get("unit") if panel["type"] == "heatmap" else None
    assert defaults.get("unit") or columns or heat_unit


@pytest.mark.parametrize("dashboard", DASHBOARDS.values(), ids=list(DASHBOARDS))
def test_panels_lie_side_by_side(dashboard):
    taken = set()
    for panel in dashboard["panels"]:
        box = panel["gridPos"]
        cells = {(box["x"] + dx, box["y"] + dy) for dx in range(box["w"]) for dy in range(box["h"])}
        assert not taken & cells
        assert box["x"] + box["w"] <= 24
        taken |= cells
    assert len({panel["id"] for panel in dashboard["panels"]}) == len(dashboard["panels"])


def scraped(name):
    jobs = yaml.safe_load((MONITORING / name).read_text())["scrape_configs"]
    assert {job["job_name"] for job in jobs} == {"router", "prefill", "decode", "agent"}
    return {target.split(":")[0] for job in jobs for target in job["static_configs"][0]["targets"]}


def test_prometheus_scrapes_every_service_of_the_compose_file():
    services = yaml.safe_load((ROOT / "docker-compose.yml").read_text())["services"]
    assert scraped("prometheus.yml") == services.keys() - {"prometheus", "grafana", "jaeger"}


def test_on_a_gpu_prometheus_scrapes_what_is_started_there():
    base, cuda = ((MONITORING / name).read_text() for name in ("prometheus.yml", "prometheus.cuda.yml"))
    cuda = cuda.replace(
        """dns_sd_configs:  # no target while the service is not started
      - {names: [prefill-0], type: A, port: 9100}""",
        'static_configs:\n      - targets: ["prefill-0:9100"]',
    )
    for worker in ("prefill-1", "decode-1"):
        base = base.replace(f', "{worker}:9100"', "")
    assert yaml.safe_load(base) == yaml.safe_load(cuda)
