"""Panels in one style: title, description, unit, and thresholds for bad values."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from grafana_foundation_sdk.builders import common as common_builders
from grafana_foundation_sdk.builders import dashboard as builders
from grafana_foundation_sdk.builders import heatmap as heatmaps
from grafana_foundation_sdk.builders import prometheus, stat, table, timeseries
from grafana_foundation_sdk.models import common, dashboard, heatmap
from grafana_foundation_sdk.models.prometheus import PromQueryFormat

DATA_SOURCE = dashboard.DataSourceRef(type_val="prometheus", uid="${datasource}")
Steps = Sequence[tuple[float, str]]  # from this value on, this color
Queries = Mapping[str, str]  # legend -> PromQL
LINE_HEIGHT, STAT_HEIGHT = 8, 4
QUANTILES = {"p50": 0.5, "p90": 0.9, "p99": 0.99}


def lines(
    title: str, description: str, unit: str, queries: Queries, *, steps: Steps = (), stacked: bool = False
) -> timeseries.Panel:
    """Return a panel of values over time, one line per series. `steps` are drawn as lines."""
    panel = timeseries.Panel().title(title).description(description).unit(unit).datasource(DATA_SOURCE)
    panel.height(LINE_HEIGHT).span(8).min(0).line_width(1).fill_opacity(30 if stacked else 8)
    panel.show_points(common.VisibilityMode.NEVER)
    panel.legend(
        common_builders.VizLegendOptions()
        .show_legend(True)
        .display_mode(common.LegendDisplayMode.LIST)
        .placement(common.LegendPlacement.BOTTOM)
    )
    panel.tooltip(
        common_builders.VizTooltipOptions().mode(common.TooltipDisplayMode.MULTI).sort(common.SortOrder.DESCENDING)
    )
    if stacked:
        panel.stacking(common_builders.StackingConfig().mode(common.StackingMode.NORMAL))
    if steps:
        panel.thresholds(_thresholds(steps))
        style = common_builders.GraphThresholdsStyleConfig().mode(common.GraphThresholdsStyleMode.DASHED)
        panel.thresholds_style(style)
    for letter, (legend, expression) in zip("ABCDEFGH", queries.items(), strict=False):
        panel.with_target(_target(letter, expression).range().legend_format(legend))
    return panel


def figure(
    title: str, description: str, unit: str, expression: str, *, steps: Steps = (), base: str = "green"
) -> stat.Panel:
    """Return a panel with the newest value in large type, colored by `steps`, or `base` below the first."""
    panel = stat.Panel().title(title).description(description).unit(unit).datasource(DATA_SOURCE)
    panel.height(STAT_HEIGHT).span(3).thresholds(_thresholds(steps, base))
    panel.graph_mode(common.BigValueGraphMode.AREA)
    panel.color_mode(common.BigValueColorMode.VALUE)
    panel.reduce_options(common_builders.ReduceDataOptions().calcs(["lastNotNull"]))
    return panel.with_target(_target("A", expression).range())


def heat(title: str, description: str, unit: str, expression: str) -> heatmaps.Panel:
    """Return a panel with a histogram over time."""
    panel = heatmaps.Panel().title(title).description(description).datasource(DATA_SOURCE)
    panel.height(LINE_HEIGHT).span(8).calculate(False)
    panel.color(
        heatmaps.HeatmapColorOptions()
        .mode(heatmap.HeatmapColorMode.SCHEME)
        .scheme("Oranges")
        .scale(heatmap.HeatmapColorScale.EXPONENTIAL)
        .exponent(0.5)
        .steps(64)
    )
    panel.y_axis(heatmaps.YAxisConfig().unit(unit)).cell_gap(1)
    panel.filter_values(heatmaps.FilterValueRange().le(1e-9))
    panel.rows_frame(heatmaps.RowsHeatmapOptions().layout(common.HeatmapCellLayout.AUTO))
    panel.show_y_histogram()
    return panel.with_target(_target("A", expression).range().legend_format("{{le}}").format(PromQueryFormat.HEATMAP))


@dataclass(frozen=True)
class Column:
    """A column of a table: its title, the query of its values, and their style."""

    title: str
    expression: str
    unit: str = "short"
    steps: Steps = ()


def rows(title: str, description: str, columns: Sequence[Column]) -> table.Panel:
    """Return a table with one row for each set of labels that the columns' queries have in common."""
    panel = table.Panel().title(title).description(description).datasource(DATA_SOURCE)
    panel.height(LINE_HEIGHT).span(24).filterable(True)
    renamed: dict[str, str] = {}
    for letter, column in zip("ABCDEFGHIJKLMN", columns, strict=False):
        panel.with_target(_target(letter, column.expression).instant().format(PromQueryFormat.TABLE))
        renamed[f"Value #{letter}"] = column.title
        properties = [dashboard.DynamicConfigValue("unit", column.unit)]
        if column.steps:
            properties.append(dashboard.DynamicConfigValue("thresholds", _thresholds(column.steps).build()))
            properties.append(dashboard.DynamicConfigValue("custom.cellOptions", {"type": "color-text"}))
        panel.override_by_name(column.title, properties)
    panel.with_transformation(dashboard.DataTransformerConfig("merge", options={}))
    layout: dict[str, Any] = {"excludeByName": {"Time": True}, "indexByName": {}, "renameByName": renamed}
    return panel.with_transformation(dashboard.DataTransformerConfig("organize", options=layout))


def _target(letter: str, expression: str) -> prometheus.Dataquery:
    return prometheus.Dataquery().ref_id(letter).expr(expression).datasource(DATA_SOURCE)


def _thresholds(steps: Steps, base: str = "green") -> builders.ThresholdsConfig:
    found = [dashboard.Threshold(None, base), *(dashboard.Threshold(value, color) for value, color in steps)]
    return builders.ThresholdsConfig().mode(dashboard.ThresholdsMode.ABSOLUTE).steps(found)
