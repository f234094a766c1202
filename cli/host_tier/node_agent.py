"""The node agent as a service of `serve`, which stops last."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path

from cli.cluster.plan import Plan
from cli.cluster.ports import LOOPBACK
from cli.cluster.service import ServiceSpec
from kvstore.tier.settings import AgentConfig

OWN_FIELDS = "host", "port", "socket", "cluster_token", "metrics_port", "drain_grace_seconds"  # no flags of `serve`


@dataclass(frozen=True, slots=True)
class NodeAgent:
    """The node agent's settings and its gRPC port."""

    config: AgentConfig
    port: int

    def socket(self, run_dir: Path) -> str:
        """Return the path of its socket. Workers that are ready earlier wait for it."""
        return str(run_dir / "agent.sock")

    def spec(self, plan: Plan) -> ServiceSpec:
        config = dataclasses.replace(
            self.config,
            host=LOOPBACK,
            port=self.port,
            socket=self.socket(plan.run_dir),
            metrics_port=plan.config.metrics_ports.get("agent", 0),
        )
        return plan.spec("agent", "kvstore", [config], f"{LOOPBACK}:{self.port}", stop_stage=2)


def node_agent(config: AgentConfig, port: int) -> NodeAgent | None:
    """Return the node agent; None without a host tier, which is all that it holds."""
    return NodeAgent(config, port) if config.host_tier_gb > 0 else None
