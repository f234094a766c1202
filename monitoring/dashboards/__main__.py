"""Writes the dashboards' JSON (`make dashboards`) where Grafana's provisioning looks for it."""

from __future__ import annotations

from pathlib import Path

from monitoring.dashboards import engine, kv, overview

FOLDER = Path(__file__).parents[1] / "grafana" / "dashboards"


def dashboards() -> dict[Path, str]:
    """Return the JSON of each file."""
    modules = {"mini-infer": overview, "mini-infer-kv": kv, "mini-infer-engine": engine}
    return {FOLDER / f"{name}.json": module.dashboard() for name, module in modules.items()}


if __name__ == "__main__":
    for path, text in dashboards().items():
        path.write_text(text)
