"""The node agent's Prometheus metrics: read from its books when somebody asks, no counters kept beside them."""

from __future__ import annotations

from collections.abc import Callable

from common.metrics import MetricSet, export_start_time
from common.scrape import serve_scrapes
from kvstore.tier.agent import TierServer
from kvstore.tier.regions import Regions


class TierMetrics:
    """Totals over all regions."""

    def __init__(self, regions: Regions, tier: TierServer) -> None:
        self._regions = regions
        self._tier = tier
        self._set = MetricSet({"role": "agent"})
        export_start_time(self._set)

    def render(self) -> bytes:
        """The text for a scrape."""
        tiers = [region.tier for region in self._regions.all()]
        slots = {
            "free": sum(tier.num_free for tier in tiers),
            "cached": sum(tier.num_cached for tier in tiers),
            "pinned": sum(tier.num_pinned for tier in tiers),
        }
        for state, count in slots.items():
            self._set.gauge("mini_infer_host_tier_slots", state=state).set(count)
        self._set.gauge("mini_infer_host_tier_bytes").set(self._regions.used_bytes)
        self._set.gauge("mini_infer_host_tier_clients").set(self._tier.num_clients)
        return self._set.render()


def serve_metrics(
    host: str, port: int, regions: Regions, tier: TierServer, is_ready: Callable[[], bool]
) -> Callable[[], None]:
    """Serve on `port` of `host` (0: not at all); returns what ends it. Raises ConfigError when it is taken."""
    if not port:
        return lambda: None
    return serve_scrapes(TierMetrics(regions, tier).render, host, port, is_ready)
