"""NIXL in this process: one agent, the host memory that it has registered, and one-sided reads of peers' memory.

NIXL (the packages `nixl-cu12` and `nixl-cu13`) moves bytes by UCX: RDMA where a network has it, else TCP, and shared
memory within a host. A thread of its own drives reads that peers make here; it costs a tenth of a core when idle, so
an agent is made only where it is asked for.
"""

from __future__ import annotations

import contextlib
import importlib
import logging
import threading
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from common.errors import ConfigError, HandshakeError, TransferError
from kvstore.handle.handle import MAX_TEXT
from kvstore.transports.transport import Blocks

PACKAGES = ("nixl_cu13", "nixl_cu12")
BACKEND = "UCX"
POLL_SECONDS = 50e-6
MAX_POOLS = 256
MAX_METADATA_BYTES = 1 << 20
Span = tuple[int, int]  # address and bytes


@dataclass(frozen=True, slots=True)
class RemoteMemory:
    """Rows of host memory in another process: uint8 [num_rows, row_bytes] at an address there."""

    address: int
    num_rows: int
    row_bytes: int

    def span(self, row: int, count: int) -> Span:
        """`count` rows from `row` on. Raises TransferError for rows that are not there."""
        if not 0 <= row <= row + count <= self.num_rows:
            raise TransferError("the KV handle names a block outside the peer's memory")
        return self.address + row * self.row_bytes, count * self.row_bytes


@dataclass(frozen=True, slots=True)
class RemoteAgent:
    """Another process as this one's agent knows it: its name, and its pools by rank."""

    name: str
    pools: Sequence[RemoteMemory]


class NixlAgent:
    """Safe to use from several threads. `register` before `describe`."""

    def __init__(self, name: str) -> None:
        """name: unlike that of any other agent that it will meet. Raises ConfigError without the package."""
        api = _import_api()
        config = api.nixl_agent_config(backends=[BACKEND], sync_mode=api.nixl_thread_sync_t.NIXL_THREAD_SYNC_STRICT)
        try:
            self._agent: Any = api.nixl_agent(name, config)
        except Exception as error:  # NIXL's own exceptions are RuntimeErrors and others
            raise ConfigError(f"NIXL cannot start: {error}") from error
        if BACKEND not in self._agent.backends:
            raise ConfigError(f"NIXL has no {BACKEND} here: its package is incomplete")
        self.name = name
        self._pools: list[list[int]] = []
        self._users: Counter[str] = Counter()  # of peers, by name: NIXL forgets a peer for all of them at once
        self._lock = threading.Lock()

    def register(self, blocks: Blocks) -> None:
        """Let NIXL read and write these bytes; they must stay where they are. Raises ConfigError."""
        try:
            self._agent.register_memory([(blocks.ctypes.data, blocks.nbytes, 0, "")], "DRAM", [BACKEND])
        except Exception as error:  # as above: memory that may not be locked, most likely
            raise ConfigError(f"NIXL cannot register {blocks.nbytes / 1e9:.2f} GB of memory: {error}") from error

    def offer(self, blocks: Blocks) -> None:
        """Register a pool, or the rows in front of one, for peers. Ranks come in their order."""
        self.register(blocks)
        self._pools.append([blocks.ctypes.data, *blocks.shape])

    def describe(self) -> bytes:
        """What a peer needs to read this process's pools."""
        return msgspec.msgpack.encode([self._agent.get_agent_metadata(), self._pools])

    def connect(self, description: bytes) -> RemoteAgent:
        """Get to know a peer by its `describe`, until `disconnect`. Raises HandshakeError, TransferError."""
        metadata, pools = _read_description(description)
        with self._lock:
            try:
                name = self._agent.add_remote_agent(metadata)
            except Exception as error:  # a peer's bytes, in the hands of a library
                raise TransferError(f"NIXL cannot reach the peer: {error}") from error
            peer = RemoteAgent(name.decode() if isinstance(name, bytes) else str(name), pools)
            self._users[peer.name] += 1
        return peer

    def share(self, peer: RemoteAgent) -> None:
        """Count one more user of a peer that is connected. It calls `disconnect`, too."""
        with self._lock:
            self._users[peer.name] += 1

    def disconnect(self, peer: RemoteAgent) -> None:
        """Forget the peer when this was its last user."""
        with self._lock:
            self._users[peer.name] -= 1
            if self._users[peer.name] == 0:
                del self._users[peer.name]
                with contextlib.suppress(Exception):  # it may be gone already: that is what is wanted
                    self._agent.remove_remote_agent(peer.name)

    def read(self, peer: RemoteAgent, remote: Sequence[Span], local: Sequence[Span]) -> NixlRead:
        """Start to copy the peer's spans to registered ones here. Raises TransferError."""
        try:
            descriptors = [
                self._agent.get_xfer_descs([(address, size, 0) for address, size in spans], "DRAM")
                for spans in (local, remote)
            ]
            handle = self._agent.initialize_xfer("READ", *descriptors, peer.name, backends=[BACKEND])
        except Exception as error:  # memory that the peer did not register, or a peer that has gone
            raise TransferError(f"NIXL cannot read the peer: {error}") from error
        return NixlRead(self._agent, handle)


class NixlRead:
    """One transfer that has been started. Until `has_ended`, its local memory may change."""

    def __init__(self, agent: Any, handle: Any) -> None:
        self._agent = agent
        self._handle = handle
        self._state = self._ask(lambda: agent.transfer(handle))

    def wait(self, deadline: float) -> None:
        """Wait until the bytes are here (time.monotonic). Raises TransferError."""
        while self._state == "PROC":
            if time.monotonic() > deadline:
                raise TransferError("the peer's memory was not read in time")
            time.sleep(POLL_SECONDS)
            self._state = self._ask(lambda: self._agent.check_xfer_state(self._handle))
        if self._state != "DONE":
            raise TransferError(f"the peer's memory cannot be read ({self._state})")

    def has_ended(self) -> bool:
        """Whether the transfer is over, well or not, so that its memory may be used for something else."""
        if self._state == "PROC":
            self._state = self._ask(lambda: self._agent.check_xfer_state(self._handle))
        return self._state != "PROC"

    def release(self) -> None:
        """Free what NIXL keeps of the transfer. After `has_ended`."""
        self._ask(lambda: self._agent.release_xfer_handle(self._handle))

    def _ask(self, call: Any) -> str:
        try:
            return str(call())
        except Exception as error:  # noqa: BLE001 - of a peer that has gone; the transfer has failed then
            return f"{type(error).__name__}: {error}"


def _import_api() -> Any:
    """Import NIXL. Raises ConfigError with what to install."""
    for package in PACKAGES:
        try:
            api = importlib.import_module(f"{package}._api")
            logging.raiseExceptions = True  # importing it has changed that, and sent its lines to stdout
            logger = logging.getLogger("nixl")
            logger.handlers.clear()
            logger.propagate = True
            logger.setLevel(logging.WARNING)
            return api
        except ModuleNotFoundError as error:
            if error.name != package:
                raise ConfigError(f"{package} cannot be imported: {error}") from error
    raise ConfigError("--kv-transport nixl needs NIXL: pip install 'mini-infer[nixl]'")


def _read_description(description: bytes) -> tuple[bytes, list[RemoteMemory]]:
    """Check what a peer says of itself. Raises HandshakeError."""
    try:
        value: Any = msgspec.msgpack.decode(description)
    except (ValueError, RecursionError) as error:  # msgspec.DecodeError is a ValueError
        raise HandshakeError("the peer's description of its memory is malformed") from error
    match value:
        case [bytes() as metadata, list() as pools] if (
            len(metadata) <= MAX_METADATA_BYTES and len(pools) <= MAX_POOLS
        ):
            pass
        case _:
            raise HandshakeError("the peer's description of its memory is malformed")
    memories: list[RemoteMemory] = []
    for pool in pools:
        match pool:
            case [int() as address, int() as num_rows, int() as row_bytes] if min(pool) > 0:
                memories.append(RemoteMemory(address, num_rows, row_bytes))
            case _:
                raise HandshakeError("the peer's description of its memory is malformed")
    return metadata, memories


def agent_name(worker_id: str, epoch: int) -> str:
    """Name of the agent of one life of a worker."""
    return f"{worker_id[:MAX_TEXT]}/{epoch:x}"
