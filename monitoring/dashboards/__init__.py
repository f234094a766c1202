"""Grafana's dashboards as code: `python -m monitoring.dashboards` writes what monitoring/grafana/dashboards holds."""
