"""The router's metrics port: threads serve scrapes, and the event loop renders their text."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from common.metrics_port.server import serve_scrapes
from router.config import RouterConfig

SCRAPE_SECONDS = 5.0  # for the event loop to render a scrape


def open_metrics_port(config: RouterConfig, metrics_text: Callable[[], bytes]) -> Callable[[], None]:
    """Open the metrics port, and return a function that closes it. Raises ConfigError if the port is taken.

    The running event loop renders the text, as for /metrics on the main port: no other thread may read the router's
    state.
    """
    loop = asyncio.get_running_loop()

    async def text() -> bytes:
        return metrics_text()

    def render() -> bytes:
        return asyncio.run_coroutine_threadsafe(text(), loop).result(SCRAPE_SECONDS)

    return serve_scrapes(render, config.metrics_host or config.host, config.metrics_port)
