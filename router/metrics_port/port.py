"""The router's metrics port: scrapes on threads, whose text the event loop makes."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from common.metrics_port.server import serve_scrapes
from router.config import RouterConfig

SCRAPE_SECONDS = 5.0  # for the event loop to come to a scrape


def open_metrics_port(config: RouterConfig, metrics_text: Callable[[], bytes]) -> Callable[[], None]:
    """Open the metrics port; returns what closes it. Raises ConfigError when it is taken.

    The text is made on the running loop, as for the main port's /metrics: nothing else may read the router's state.
    """
    loop = asyncio.get_running_loop()

    async def text() -> bytes:
        return metrics_text()

    def render() -> bytes:
        return asyncio.run_coroutine_threadsafe(text(), loop).result(SCRAPE_SECONDS)

    return serve_scrapes(render, config.metrics_host or config.host, config.metrics_port)
