"""The router's metrics port: threads serve scrapes, and the event loop renders their text."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from common.config import require
from common.metrics_port.server import serve_scrapes
from router.config import RouterConfig
from router.metrics_port.settings import RouterMetricsSettings

SCRAPE_SECONDS = 5.0  # for the event loop to render a scrape


def open_metrics_port(config: RouterConfig, metrics_text: Callable[[], bytes]) -> Callable[[], None]:
    """Open the metrics port, if there is one, and return a function that closes it. Raises ConfigError.

    The running event loop renders the text, as for /metrics on the main port: no other thread may read the router's
    state.
    """
    settings = config.of(RouterMetricsSettings)
    port = settings.metrics_port
    if not port:
        return lambda: None
    require(port != config.port, f"--metrics-port {port}: choose 1 to 65535, not --port (0: none)")
    loop = asyncio.get_running_loop()

    async def text() -> bytes:
        return metrics_text()

    def render() -> bytes:
        return asyncio.run_coroutine_threadsafe(text(), loop).result(SCRAPE_SECONDS)

    return serve_scrapes(render, settings.metrics_host or config.host, port)
