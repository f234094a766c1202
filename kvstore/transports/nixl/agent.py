"""NIXL in this process: one agent, its registered host memory, and one-sided reads of peers' memory.

NIXL (packages `nixl-cu12` and `nixl-cu13`) transfers with UCX: RDMA if the network supports it, otherwise TCP, and
shared memory within a host. A separate thread drives peers' reads here and costs a twentieth of a core when idle, so
an agent is only created where it is asked for.
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
THREAD_WAIT_MICROSECONDS = 1000  # at most, until its thread looks again; events wake it at once
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
        """Return `count` rows beginning at `row`. Raises TransferError for rows out of range."""
        if not 0 <= row <= row + count <= self.num_rows:
            raise TransferError("the KV handle names a block outside the peer's memory")
        return self.address + row * self.row_bytes, count * self.row_bytes


@dataclass(frozen=True, slots=True)
class RemoteAgent:
    """A peer as this process's agent knows it: its name, and its pools by rank."""

    name: str
    pools: Sequence[RemoteMemory]


class NixlAgent:
    """Safe to use from several threads. `register` precedes `describe`."""

    def __init__(self, name: str) -> None:
        """name: different from that of every peer. Raises ConfigError without the package."""
        api = _import_api()
        try:
            # The agent inside is replaced, since the API gives no access to its settings.
            self._agent: Any = api.nixl_agent(name, api.nixl_agent_config(backends=[]))
            self._agent.agent = api.nixlBind.nixlAgent(name, _thread_that_waits(api))
            self._agent.create_backend(BACKEND)
        except Exception as error:  # NIXL's own exceptions are RuntimeErrors and others
            raise ConfigError(f"NIXL cannot start: {error}") from error
        if BACKEND not in self._agent.backends:
            raise ConfigError(f"NIXL has no {BACKEND} here: its package is incomplete")
        self.name = name
        self._pools: list[list[int]] = []
        self._users: Counter[str] = Counter()  # users of each peer's name: NIXL forgets a peer for all at once
        self._lock = threading.Lock()

    def register(self, blocks: Blocks) -> None:
        """Let NIXL read and write these bytes, which must stay in place. Raises ConfigError."""
        try:
            self._agent.register_memory([(blocks.ctypes.data, blocks.nbytes, 0, "")], "DRAM", [BACKEND])
        except Exception as error:  # as above: memory that may not be locked, most likely
            raise ConfigError(f"NIXL cannot register {blocks.nbytes / 1e9:.2f} GB of memory: {error}") from error

    def offer(self, blocks: Blocks) -> None:
        """Register a pool, or the staging rows in front of one, for peers. Call in the order of ranks."""
        self.register(blocks)
        self._pools.append([blocks.ctypes.data, *blocks.shape])

    def describe(self) -> bytes:
        """Return the description that peers need to read this process's pools."""
        return msgspec.msgpack.encode([self._agent.get_agent_metadata(), self._pools])

    def connect(self, description: bytes) -> RemoteAgent:
        """Add a peer by its description until `disconnect`. Raises HandshakeError, TransferError."""
        metadata, pools = _read_description(description)
        with self._lock:
            try:
                name = self._agent.add_remote_agent(metadata)
            except Exception as error:  # a library parses the peer's bytes
                raise TransferError(f"NIXL cannot reach the peer: {error}") from error
            peer = RemoteAgent(name.decode() if isinstance(name, bytes) else str(name), pools)
            self._users[peer.name] += 1
        return peer

    def share(self, peer: RemoteAgent) -> None:
        """Count one more user of a connected peer, who also calls `disconnect`."""
        with self._lock:
            self._users[peer.name] += 1

    def disconnect(self, peer: RemoteAgent) -> None:
        """Remove the peer if this was its last user."""
        with self._lock:
            self._users[peer.name] -= 1
            if self._users[peer.name] == 0:
                del self._users[peer.name]
                with contextlib.suppress(Exception):  # it may be gone already, which is fine
                    self._agent.remove_remote_agent(peer.name)

    def read(self, peer: RemoteAgent, remote: Sequence[Span], local: Sequence[Span]) -> NixlRead:
        """Start copying the peer's spans to registered ones here. Raises TransferError."""
        try:
            descriptors = [
                self._agent.get_xfer_descs([(address, size, 0) for address, size in spans], "DRAM")
                for spans in (local, remote)
            ]
            handle = self._agent.initialize_xfer("READ", *descriptors, peer.name, backends=[BACKEND])
        except Exception as error:  # memory that the peer did not register, or a peer that is gone
            raise TransferError(f"NIXL cannot read the peer: {error}") from error
        return NixlRead(self._agent, handle)


class NixlRead:
    """One transfer in progress. Until `has_ended`, it may write to its local memory."""

    def __init__(self, agent: Any, handle: Any) -> None:
        self._agent = agent
        self._handle = handle
        self._state = self._ask(lambda: agent.transfer(handle))

    def wait(self, deadline: float) -> None:
        """Wait until the bytes have arrived (deadline: time.monotonic). Raises TransferError."""
        while self._state == "PROC":
            if time.monotonic() > deadline:
                raise TransferError("the peer's memory was not read in time")
            time.sleep(POLL_SECONDS)
            self._state = self._ask(lambda: self._agent.check_xfer_state(self._handle))
        if self._state != "DONE":
            raise TransferError(f"the peer's memory cannot be read ({self._state})")

    def has_ended(self) -> bool:
        """Whether the transfer has succeeded or failed, so that its memory may be reused."""
        if self._state == "PROC":
            self._state = self._ask(lambda: self._agent.check_xfer_state(self._handle))
        return self._state != "PROC"

    def release(self) -> None:
        """Free NIXL's resources of the transfer. Call after `has_ended`."""
        self._ask(lambda: self._agent.release_xfer_handle(self._handle))

    def _ask(self, call: Any) -> str:
        try:
            return str(call())
        except Exception as error:  # noqa: BLE001 - of a peer that has gone; the transfer has failed then
            return f"{type(error).__name__}: {error}"


def _import_api() -> Any:
    """Import NIXL. Raises ConfigError, which says what to install."""
    for package in PACKAGES:
        try:
            api = importlib.import_module(f"{package}._api")
            logging.raiseExceptions = True  # the import changes this, and sends NIXL's log to stdout
            logger = logging.getLogger("nixl")
            logger.handlers.clear()
            logger.propagate = True
            logger.setLevel(logging.WARNING)
            return api
        except ModuleNotFoundError as error:
            if error.name != package:
                raise ConfigError(f"{package} cannot be imported: {error}") from error
    raise ConfigError("--kv-transport nixl needs NIXL: pip install 'mini-infer[nixl]'")


def _thread_that_waits(api: Any) -> Any:
    """Return an agent's settings. Those of NIXL's Python API let its thread spin: it takes a core when idle."""
    settings = api.nixlBind.nixlAgentConfig()
    settings.useProgThread = True
    settings.pthrDelay = THREAD_WAIT_MICROSECONDS
    settings.syncMode = api.nixl_thread_sync_t.NIXL_THREAD_SYNC_STRICT.value
    return settings


def _read_description(description: bytes) -> tuple[bytes, list[RemoteMemory]]:
    """Check a peer's description. Raises HandshakeError."""
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
    """Return the agent's name for one life of a worker."""
    return f"{worker_id[:MAX_TEXT]}/{epoch:x}"
