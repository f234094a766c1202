"""The common parts of all dashboards: variables, links between them, alerts as annotations, and their JSON."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from grafana_foundation_sdk.builders import dashboard as builders
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.models import dashboard

from common.metrics import START_TIME
from monitoring.dashboards.panels import DATA_SOURCE
from monitoring.dashboards.queries import NAMESPACE

Section = tuple[str, Sequence[Any]]  # a row's title and its panels
TAG = "mini-infer"
FIRING = f'ALERTS{{alertstate="firing", part_of="mini-infer", {NAMESPACE}}}'
# Variable -> label, and matchers with the variables before it.
VARIABLES: Mapping[str, tuple[str, str]] = {
    "namespace": ("namespace", ""),
    "model": ("model_name", NAMESPACE),
    "role": ("role", f'{NAMESPACE}, worker!=""'),
    "worker": ("worker", f'{NAMESPACE}, model_name=~"$model", role=~"$role"'),
}


def board(uid: str, title: str, description: str, sections: Sequence[Section]) -> str:
    """Return the dashboard's JSON. Panels are numbered in reading order."""
    made = builders.Dashboard(title).uid(uid).description(description).tags([TAG]).timezone("browser").refresh("10s")
    made.time("now-30m", "now").editable().tooltip(dashboard.DashboardCursorSync.CROSSHAIR)
    made.with_variable(builders.DatasourceVariable("datasource").label("data source").type("prometheus"))
    for name in VARIABLES:
        made.with_variable(_variable(name))
    made.annotation(
        builders.AnnotationQuery().name("alerts").datasource(DATA_SOURCE).enable(True).icon_color("red").expr(FIRING)
    )
    made.link(
        builders.DashboardLink("mini-infer")
        .type(dashboard.DashboardLinkType.DASHBOARDS)
        .tags([TAG])
        .include_vars(True)
        .keep_time(True)
    )
    for row_title, panels in sections:
        made.with_row(builders.Row(row_title))
        for panel in panels:
            made.with_panel(panel)
    plain = json.loads(json.dumps(made.build(), cls=JSONEncoder))
    for number, panel in enumerate(plain["panels"], 1):
        panel["id"] = number
    for annotation in plain["annotations"]["list"]:  # fields that the Prometheus plugin reads but the builder lacks
        annotation |= {"titleFormat": "{{alertname}}", "tagKeys": "severity,role,worker,model_name"}
    return json.dumps(plain, indent=1, sort_keys=True) + "\n"


def _variable(name: str) -> builders.QueryVariable:
    """Return a variable that allows any value at first: `.*` also matches series without the label, as outside of
    Kubernetes."""
    label, matchers = VARIABLES[name]
    query: dict[str, object] = {"query": f"label_values({START_TIME.name}{{{matchers}}}, {label})", "refId": name}
    return (
        builders.QueryVariable(name)
        .datasource(DATA_SOURCE)
        .query(query)
        .refresh(dashboard.VariableRefresh.ON_TIME_RANGE_CHANGED)
        .sort(dashboard.VariableSort.ALPHABETICAL_ASC)
        .multi(True)
        .include_all(True)
        .all_value(".*")
        .current(dashboard.VariableOption(text=["All"], value=["$__all"]))
    )
