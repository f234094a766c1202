"""Settings of limits on clients' connections."""

from __future__ import annotations

from dataclasses import dataclass

from common.config import check_not_negative, require, setting


@dataclass(frozen=True)
class ConnectionSettings:
    max_connections: int = setting(2048, "HTTP connections; requests on more get 503")
    reserved_per_address: int = setting(
        32, "beyond --max-connections, an address with fewer than this is let in, up to a sixteenth more; 0: none"
    )
    stalled_client_seconds: float = setting(
        60.0, "a client that reads nothing of its answer for this long is cut off"
    )

    def __post_init__(self) -> None:
        require(self.max_connections >= 1, "--max-connections must be at least 1")
        check_not_negative(self, "reserved_per_address")
        require(self.stalled_client_seconds >= 1, "--stalled-client-seconds must be at least 1")
