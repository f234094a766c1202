"""Runs the node agent's process: bind, serve, end on SIGTERM."""

from __future__ import annotations

import asyncio
import logging
import signal

from common.config import from_args
from common.errors import ConfigError
from common.logging import report_end, setup_logging
from common.metrics_port.pulse import Pulse
from common.net.rpc import RpcServer
from kvstore.tier.agent import TierServer
from kvstore.tier.metrics import serve_metrics
from kvstore.tier.regions import Regions
from kvstore.tier.settings import AgentConfig

logger = logging.getLogger("kvstore")


async def serve(config: AgentConfig) -> None:
    """Serve until SIGTERM or SIGINT. Raises ConfigError if a port, the path or the memory is not available."""
    if not config.host_tier_gb:
        raise ConfigError("--host-tier-gb 0 leaves a node agent nothing to do: don't start one")
    stopping = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stopping.set)
    regions = Regions(int(config.host_tier_gb * 2**30), int(config.region_gb * 2**30))
    server = RpcServer(config.host, config.port, config.cluster_token)
    tier = TierServer(regions, config.socket_path)
    close_metrics = serve_metrics(config.host, config.metrics_port, regions, tier, Pulse(server))
    try:
        await server.start()
        await tier.start()
        await server.health.set_serving(True)
        logger.info("ready: node agent on %s, workers on %s", server.address, config.socket_path)
        await stopping.wait()
        logger.info("stopping")
        await server.health.set_serving(False)
        await server.stop(config.drain_grace_seconds)
    finally:
        await tier.close()
        close_metrics()
        regions.close()


def main() -> int:
    try:
        config = from_args(AgentConfig, prog="kvstore")
        setup_logging("kvstore", config.log_level, config.log_format)
        asyncio.run(serve(config))
    except ConfigError as error:
        report_end("kvstore", error)
        return 1
    return 0
