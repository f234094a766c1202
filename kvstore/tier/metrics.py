"""The node agent's Prometheus metrics, computed from its state at each scrape; there are no counters."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from common.metrics import MetricSet, export_start_time, gauge
from common.metrics_port.server import serve_scrapes
from kvstore.tier.agent import TierServer
from kvstore.tier.regions import Regions

METRICS = (
    gauge("mini_infer_host_tier_slots", "Block slots of the host tier by state", "state"),
    gauge("mini_infer_host_tier_bytes", "Memory of the host tier"),
    gauge("mini_infer_host_tier_clients", "Workers connected to the host tier"),
)


def serve_metrics(
    host: str, port: int, regions: Regions, tier: TierServer, is_ready: Callable[[], bool]
) -> Callable[[], None]:
    """Serve on `port` of `host` (0: nothing). Returns a function that stops it. Raises ConfigError if it is taken."""
    if not port:
        return lambda: None
    metrics = MetricSet({"role": "agent"}, wings=METRICS)
    export_start_time(metrics)
    return serve_scrapes(partial(render, metrics, regions, tier), host, port, is_ready)


def render(metrics: MetricSet, regions: Regions, tier: TierServer) -> bytes:
    """Return the text of a scrape: totals over all regions."""
    allocators = [region.tier for region in regions.all()]
    slots = {
        "free": sum(allocator.num_free for allocator in allocators),
        "cached": sum(allocator.num_cached for allocator in allocators),
        "pinned": sum(allocator.num_pinned for allocator in allocators),
    }
    for state, count in slots.items():
        metrics.gauge("mini_infer_host_tier_slots", state=state).set(count)
    metrics.gauge("mini_infer_host_tier_bytes").set(regions.used_bytes)
    metrics.gauge("mini_infer_host_tier_clients").set(tier.num_clients)
    return metrics.render()
