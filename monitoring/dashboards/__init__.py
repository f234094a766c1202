"""Grafana's dashboards as code: `python -m monitoring.dashboards` writes monitoring/grafana/dashboards."""
