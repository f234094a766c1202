"""Settings of the TCP transport."""

from __future__ import annotations

from dataclasses import dataclass

from common.config import setting


@dataclass(frozen=True)
class TcpSettings:
    kv_port: int = setting(0, "port from which peers read KV by tcp; 0: any free one")
