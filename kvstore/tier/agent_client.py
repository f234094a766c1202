"""The node agent's host tier as the scheduler uses it: synchronous, one round trip per call.

If the agent does not answer, the tier counts as empty and full (nothing is found, nothing fits), and the worker
continues without it. Slots of swapped sequences stay readable and owned: this process maps their memory too, and
keeps the connection open, so that an agent that was only slow does not reassign them. Once no slot is pinned, the
next call that needs memory reconnects, after a second at first and then ever less often. The new agent's memory is
mapped at the old address, so that other code does not notice.
"""

from __future__ import annotations

import logging
import os
import socket
import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

from common.errors import ConfigError, MiniInferError, TransferError, UnavailableError
from kvstore.tier.key_filter import KeyFilter, num_cells
from kvstore.tier.protocol import MAX_FRAME_BYTES
from kvstore.tier.remap import map_fd_in_place
from kvstore.transports.shared_memory import map_fd
from kvstore.transports.sockets import connect_unix, recv_frame, send_frame
from kvstore.types import BlockKey, HostSlot

logger = logging.getLogger(__name__)
CALL_SECONDS = 2.0  # the step loop waits for it
RECONNECT_SECONDS = 0.2  # the step loop waits for it, too, perhaps in vain
FIRST_DELAY_SECONDS, MAX_DELAY_SECONDS = 1.0, 30.0
START_SECONDS = 30.0  # enough to load weights, and for an agent that was killed to be restarted
RETRY_SECONDS = 0.2


class AgentHostTier:
    """`HostTier` in the memory of this host's node agent, for blocks with one `content_name`."""

    def __init__(
        self,
        socket_path: str,
        content_name: str,
        block_bytes: int,
        reconnects: bool = True,
        clock: Callable[[], float] = time.monotonic,
        start_seconds: float = START_SECONDS,
    ) -> None:
        """Raise UnavailableError if no agent answers, ConfigError if it has no memory left.

        reconnects: false if a device has the memory registered, since it would continue to use the old agent's.
        start_seconds: how long to wait for an agent's first answer.
        """
        self._socket_path = socket_path
        self._hello = ["hello", content_name, block_bytes]
        self._clock = clock
        self._delay = FIRST_DELAY_SECONDS if reconnects else float("inf")
        self._retry_at = 0.0
        self._pins: Counter[HostSlot] = Counter()
        self._sock, self.num_slots, fd = self._wait(start_seconds)
        try:
            num_bytes = self.num_slots * block_bytes + num_cells(self.num_slots)
            self.buffer = map_fd(fd, num_bytes, writable=True)
        except BaseException:  # Ctrl-C and cancelled tasks, too: nothing may stay open
            self._sock.close()
            raise
        finally:
            os.close(fd)
        self._filter = KeyFilter(self.buffer, self.num_slots, block_bytes)
        self.connected = True

    def missing(self, keys: Sequence[BlockKey]) -> list[BlockKey]:
        missing = self._call("missing", keys)
        return list(keys) if missing is None else missing

    def lookup(self, keys: Sequence[BlockKey]) -> list[HostSlot]:
        if self.connected and not (keys and self._filter.may_have(keys[0])):
            return []
        slots: list[HostSlot] = self._call("lookup", keys) or []
        self._pins.update(slots)
        return slots

    def reserve(self, keys: Sequence[BlockKey | None]) -> list[HostSlot] | None:
        slots: list[HostSlot] | None = self._call("reserve", keys)
        self._pins.update(slots or [])
        return slots

    def commit(self, slots: Sequence[HostSlot]) -> None:
        self._call("commit", slots)

    def unpin(self, slots: Sequence[HostSlot]) -> None:
        self._call("unpin", slots)
        self._pins -= Counter(slots)

    def check_integrity(self) -> None:
        wrong = self._call("check", None)
        if wrong:
            raise AssertionError(wrong)

    def close(self) -> None:
        """End the connection; the agent drops what is still pinned. The mapping lives as long as its users."""
        self.connected = False
        self._retry_at = float("inf")
        self._sock.close()

    def _call(self, verb: str, items: Sequence[Any] | None) -> Any:
        """Send one request and return the reply's value; None without an agent."""
        if not (self.connected or self._reconnect()):
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
        self._retry_at = self._clock() + self._delay
        return None

    def _reconnect(self) -> bool:
        """Try to reconnect to an agent, unless it is too early or a slot of the old one is pinned."""
        if self._pins or self._clock() < self._retry_at:
            return False
        self._delay = min(2 * self._delay, MAX_DELAY_SECONDS)
        try:
            sock, num_slots, fd = self._open(RECONNECT_SECONDS)
            try:
                if num_slots != self.num_slots:
                    raise ConfigError(f"it has {num_slots} slots now, not {self.num_slots}: restart this worker")
                map_fd_in_place(fd, self.buffer)
            except BaseException:  # Ctrl-C and cancelled tasks, too: nothing may stay open
                sock.close()
                raise
            finally:
                os.close(fd)
        except MiniInferError as error:
            logger.debug("the node agent cannot be used again: %s", error)
            self._retry_at = self._clock() + self._delay
            return False
        self._sock.close()
        self._sock, self.connected, self._delay = sock, True, FIRST_DELAY_SECONDS
        logger.info("the node agent is there again: its memory is used from now on")
        return True

    def _wait(self, seconds: float) -> tuple[socket.socket, int, int]:
        """Return `_open`'s result once an agent answers. Raises UnavailableError if none does in time."""
        deadline = time.monotonic() + seconds
        is_first = True
        while True:
            try:
                return self._open(CALL_SECONDS)
            except (UnavailableError, TransferError) as error:
                if time.monotonic() >= deadline:
                    raise UnavailableError(
                        f"the node agent does not answer on {self._socket_path} ({error}): "
                        "start it again, or start this worker without --agent-socket"
                    ) from error
                if is_first:
                    logger.warning("waiting for the node agent (%s)", error)
                    is_first = False
                time.sleep(RETRY_SECONDS)

    def _open(self, seconds: float) -> tuple[socket.socket, int, int]:
        """Return a connection, and number of slots and descriptor of the memory. Raises MiniInferError."""
        sock = connect_unix(self._socket_path, seconds)
        try:
            send_frame(sock, self._hello)
            reply, fds = recv_frame(sock, MAX_FRAME_BYTES, max_fds=1)
            num_slots = _num_slots(reply, fds)
            sock.settimeout(CALL_SECONDS)
        except OSError as error:
            sock.close()
            raise TransferError("the node agent closed the connection") from error
        except BaseException:  # Ctrl-C and cancelled tasks, too: nothing may stay open
            sock.close()
            raise
        return sock, num_slots, fds[0]


def _num_slots(reply: Any, fds: list[int]) -> int:
    match reply:
        case ["ok", int() as num_slots] if num_slots > 0 and len(fds) == 1:
            return num_slots
    for fd in fds:
        os.close(fd)
    match reply:
        case ["error", str() as message]:
            raise ConfigError(f"the node agent refuses: {message}")
    raise TransferError("the Unix socket is not a node agent's")
