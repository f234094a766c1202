"""The host tier behind the node agent, as the scheduler sees it: synchronous, one round trip per call.

When the agent does not answer, the tier is empty and full from then on (nothing is found, nothing fits) and the
worker goes on without it. Slots of swapped sequences stay readable and ours: this process maps their memory
too, and keeps the connection open, so that an agent that was only slow does not reassign them.
"""

from __future__ import annotations

import logging
import mmap
import os
import socket
from collections.abc import Sequence
from typing import Any

from common.errors import ConfigError, TransferError
from kvstore.tier.protocol import MAX_FRAME_BYTES
from kvstore.transport.shared_memory import map_fd
from kvstore.transport.unix_socket import connect_unix, recv_frame, send_frame
from kvstore.types import BlockKey, HostSlot

logger = logging.getLogger(__name__)
CALL_SECONDS = 2.0  # the step loop waits for it


class AgentHostTier:
    """`HostTier` in the memory of this host's node agent, for blocks of one content (`PoolGeometry.content_name`)."""

    def __init__(self, socket_path: str, content_name: str, block_bytes: int) -> None:
        """Raise UnavailableError when no agent answers, ConfigError when it has no memory to give."""
        self._sock: socket.socket = connect_unix(socket_path, CALL_SECONDS)
        self.connected = True
        try:
            send_frame(self._sock, ["hello", content_name, block_bytes])
            reply, fds = recv_frame(self._sock, MAX_FRAME_BYTES, max_fds=1)
            try:
                self._num_slots, self._buffer = _map_region(reply, fds, block_bytes)
            finally:
                for fd in fds:
                    os.close(fd)
        except OSError as error:
            self._sock.close()
            raise TransferError("the node agent closed the connection") from error
        except BaseException:
            self._sock.close()
            raise

    @property
    def num_slots(self) -> int:
        return self._num_slots

    @property
    def buffer(self) -> mmap.mmap:
        return self._buffer

    def contains(self, key: BlockKey) -> bool:
        return not self.missing([key])

    def missing(self, keys: Sequence[BlockKey]) -> list[BlockKey]:
        missing = self._call("missing", keys)
        return list(keys) if missing is None else missing

    def lookup(self, keys: Sequence[BlockKey]) -> list[HostSlot]:
        return self._call("lookup", keys) or []

    def reserve(self, keys: Sequence[BlockKey | None]) -> list[HostSlot] | None:
        slots: list[HostSlot] | None = self._call("reserve", keys)
        return slots

    def commit(self, slots: Sequence[HostSlot]) -> None:
        self._call("commit", slots)

    def unpin(self, slots: Sequence[HostSlot]) -> None:
        self._call("unpin", slots)

    def check_integrity(self) -> None:
        wrong = self._call("check", None)
        if wrong:
            raise AssertionError(wrong)

    def close(self) -> None:
        """End the connection; the agent drops what is still pinned. The mapping lives as long as its users."""
        self.connected = False
        self._sock.close()

    def _call(self, verb: str, items: Sequence[Any] | None) -> Any:
        """Send one request and return the reply's value; None without an agent."""
        if not self.connected:
            return None
        try:
            send_frame(self._sock, [verb] if items is None else [verb, list(items)])
            reply, _ = recv_frame(self._sock, MAX_FRAME_BYTES)
        except (OSError, TransferError) as error:
            reply = ["error", str(error)]
        match reply:
            case ["ok", value]:
                return value
            case ["error", message]:
                logger.warning("going on without the host tier: %s failed: %s", verb, message)
            case _:
                logger.warning("going on without the host tier: the node agent sent nonsense")
        self.connected = False
        return None


def _map_region(reply: Any, fds: list[int], block_bytes: int) -> tuple[int, mmap.mmap]:
    match reply:
        case ["ok", int() as num_slots] if num_slots > 0 and len(fds) == 1:
            return num_slots, map_fd(fds[0], num_slots * block_bytes, writable=True)
        case ["error", str() as message]:
            raise ConfigError(f"the node agent refuses: {message}")
    raise TransferError("the Unix socket is not a node agent's")
