"""The node agent's Prometheus metrics: read from its books when somebody asks, no counters kept beside them."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from prometheus_client import CollectorRegistry
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

from common.scrape import serve_scrapes
from kvstore.tier.agent import TierServer
from kvstore.tier.regions import Regions


class TierCollector(Collector):
    """Totals over all regions; labels come from a fixed set."""

    def __init__(self, regions: Regions, tier: TierServer) -> None:
        self._regions = regions
        self._tier = tier

    def collect(self) -> Iterator[GaugeMetricFamily]:
        slots = GaugeMetricFamily("mini_infer_host_tier_slots", "Slots of the host tier by state", labels=["state"])
        tiers = [region.tier for region in self._regions.all()]
        slots.add_metric(["free"], sum(tier.num_free for tier in tiers))
        slots.add_metric(["cached"], sum(tier.num_cached for tier in tiers))
        slots.add_metric(["pinned"], sum(tier.num_pinned for tier in tiers))
        yield slots
        yield GaugeMetricFamily("mini_infer_host_tier_bytes", "Memory of all regions", self._regions.used_bytes)
        yield GaugeMetricFamily("mini_infer_host_tier_clients", "Workers connected", self._tier.num_clients)


def serve_metrics(
    host: str, port: int, regions: Regions, tier: TierServer, is_ready: Callable[[], bool]
) -> Callable[[], None]:
    """Serve on `port` of `host` (0: not at all); returns what ends it. Raises ConfigError when it is taken."""
    if not port:
        return lambda: None
    registry = CollectorRegistry()
    registry.register(TierCollector(regions, tier))
    return serve_scrapes(registry, host, port, is_ready)
