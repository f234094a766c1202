"""PromQL over this project's metrics: names that services export, with the dashboards' variables as label matchers.

Never uses `job` or `instance`, which the scraper sets (docs/decisions/metrics-and-dashboards.md). A name that no
service exports is a KeyError when the dashboards are built.
"""

from __future__ import annotations

from common.metrics import ROUTER_SPECS, START_TIME, MetricSpec, wing_specs

NAMESPACE = 'namespace=~"$namespace"'
MODEL = f'{NAMESPACE}, model_name=~"$model"'
START = START_TIME.name
WORKER = f'{MODEL}, role=~"$role", worker=~"$worker"'
_SELECTORS: dict[str, tuple[MetricSpec, str]] = {
    START_TIME.name: (START_TIME, NAMESPACE),
    **{spec.name: (spec, MODEL) for spec in ROUTER_SPECS},
    **{spec.name: (spec, WORKER) for spec in (*wing_specs("worker"), *wing_specs("engine"))},
    **{spec.name: (spec, NAMESPACE) for spec in wing_specs("kvstore")},
}
ONE_WORKER = "namespace, model_name, role, worker"  # labels of one worker, whatever Prometheus adds


def series(metric: str, matchers: str = "") -> str:
    """Return the series of a gauge or counter that the variables and `matchers` select."""
    spec, selector = _SELECTORS[metric]
    assert spec.kind != "histogram", f"{metric}: ask for its quantile, mean or buckets"
    suffix = "_total" if spec.kind == "counter" else ""
    return f"{metric}{suffix}{{{', '.join(filter(None, (selector, matchers)))}}}"


def total(metric: str, by: str = "", matchers: str = "") -> str:
    """Return the sum of a gauge that each service has for itself."""
    return f"sum{_by(by)}({series(metric, matchers)})"


def seen(metric: str, by: str = "", matchers: str = "") -> str:
    """Return a router's gauge of something all routers see, which does not add up."""
    return f"max{_by(by)}({series(metric, matchers)})"


def rate(metric: str, by: str = "", matchers: str = "") -> str:
    """Return a counter's increase per second."""
    return f"sum{_by(by)}(rate({series(metric, matchers)}[$__rate_interval]))"


def ratio(part: str, whole: str, by: str = "") -> str:
    """Return one counter as a share of another. NaN while neither changes."""
    return f"{rate(part, by)} / {rate(whole, by)}"


def quantile(share: float, metric: str, by: str = "", matchers: str = "") -> str:
    buckets = _buckets(metric, matchers)
    return f"histogram_quantile({share}, sum{_by(by, 'le')}(rate({buckets}[$__rate_interval])))"


def mean(metric: str) -> str:
    rates = (
        f"sum(rate({_buckets(metric).replace('_bucket{', f'_{part}{{')}[$__rate_interval]))"
        for part in ("sum", "count")
    )
    return " / ".join(rates)


def uptime(by: str) -> str:
    """Return the seconds since workers started."""
    return f"max{_by(by)}(time() - {START}{{{WORKER}}})"


def heat(metric: str) -> str:
    """Return the observations per bucket in each step of the range."""
    return f"sum by (le) (increase({_buckets(metric)}[$__rate_interval]))"


def _buckets(metric: str, matchers: str = "") -> str:
    spec, selector = _SELECTORS[metric]
    assert spec.kind == "histogram", f"{metric} is no histogram"
    return f"{metric}_bucket{{{', '.join(filter(None, (selector, matchers)))}}}"


def _by(*labels: str) -> str:
    """Return ` by (...) `; empty without labels."""
    named = ", ".join(filter(None, labels))
    return f" by ({named}) " if named else ""
