"""`nixl`: one-sided reads of host memory, over RDMA where a network has it."""

from __future__ import annotations

from kvstore.transports.lease_client import LeaseClient
from kvstore.transports.nixl.agent import NixlAgent, agent_name
from kvstore.transports.nixl.reader import NAME, NixlReader
from kvstore.transports.transport import LocalPool, Reader, Transport


class NixlTransport(Transport):
    """An address is the name of the agent that has registered the pool, or the rows in front of it.

    An idle agent costs a tenth of a core, so that there is one only for who names this transport.
    """

    name = NAME
    offered = "named"
    _agent: NixlAgent | None = None

    def reader(self, pool: LocalPool, leases: LeaseClient) -> Reader:
        return pool.through_host(NixlReader(pool.host_blocks, leases, self._agent_of(pool)))

    def export(self, pool: LocalPool) -> bytes:
        agent = self._agent_of(pool)
        agent.offer(pool.host_blocks)
        return agent.name.encode()

    def describe(self) -> bytes:
        return b"" if self._agent is None else self._agent.describe()

    def _agent_of(self, pool: LocalPool) -> NixlAgent:
        """The agent of this life of the worker. Raises ConfigError without the package."""
        if self._agent is None:
            self._agent = NixlAgent(agent_name(pool.info.worker_id, pool.info.epoch))
        return self._agent
