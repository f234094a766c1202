"""The node agent: one per host, holds the host-memory tier that its workers share and that outlives them.

Workers connect to a Unix socket (`tier_protocol`), get the region's memory as a descriptor, and copy themselves;
the agent only keeps the books. Agents and workers of other hosts read blocks by key through KvTransfer.ReadKeys.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from common.errors import InvalidRequestError, MiniInferError, TransferError, UnavailableError
from common.logging import RateLimit
from common.rpc import Context, abort_with
from kvstore.pool.block_hash import KEY_BYTES
from kvstore.pool.digest import WORD_BYTES, digest_blocks
from kvstore.tier.protocol import MAX_FRAME_BYTES, TierSession, parse_hello
from kvstore.tier.regions import Regions
from kvstore.transport.service import MAX_POSITIONS, block_chunks
from kvstore.transport.unix_socket import UnixListener, pack, read_frame
from kvstore.types import BlockKey
from protos import kvstore_pb2, kvstore_pb2_grpc, types_pb2

logger = logging.getLogger(__name__)
logger.addFilter(RateLimit())
MAX_CLIENTS = 256
HELLO_SECONDS = 5.0


class TierServer:
    """The Unix socket of one agent."""

    def __init__(self, regions: Regions, socket_path: Path) -> None:
        """Raises ConfigError when the path cannot be used."""
        self._regions = regions
        self._listener = UnixListener(socket_path)
        self._server: asyncio.Server | None = None
        self._clients: set[asyncio.Task[Any]] = set()

    @property
    def num_clients(self) -> int:
        return len(self._clients)

    async def start(self) -> None:
        self._server = await asyncio.start_unix_server(self._serve_client, sock=self._listener.sock)

    async def close(self) -> None:
        """Stop listening and end all connections; workers go on without the tier."""
        if self._server is not None:
            self._server.close()
        for task in list(self._clients):
            task.cancel()
        await asyncio.gather(*self._clients, return_exceptions=True)
        self._listener.close()

    async def _serve_client(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._clients.add(task)
        try:
            if len(self._clients) <= MAX_CLIENTS:
                await self._converse(reader, writer)
        except (EOFError, OSError):
            pass  # the worker is gone
        except MiniInferError as error:
            logger.warning("ending a worker's connection: %s", error)
            with contextlib.suppress(OSError):
                writer.write(pack(["error", str(error)]))
                await writer.drain()
        finally:
            self._clients.discard(task)
            writer.close()

    async def _converse(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            hello = await asyncio.wait_for(read_frame(reader, MAX_FRAME_BYTES), HELLO_SECONDS)
        except TimeoutError:
            raise TransferError("no hello in time") from None
        with self._regions.using(*parse_hello(hello)) as region:
            session = TierSession(region.tier)
            try:
                _send_with_fd(writer, ["ok", region.tier.num_slots], region.fd)
                while True:
                    writer.write(pack(session.handle(await read_frame(reader, MAX_FRAME_BYTES))))
                    await writer.drain()
            finally:
                session.close()


class AgentService(kvstore_pb2_grpc.KvTransferServicer):  # type: ignore[misc]
    """KvTransfer of an agent: blocks of its tier by key. It has no pool and no leases."""

    def __init__(self, regions: Regions) -> None:
        self._regions = regions

    async def ReadKeys(
        self, request: kvstore_pb2.ReadKeysRequest, context: Context
    ) -> AsyncIterator[kvstore_pb2.BlockChunk]:
        """Blocks of the longest prefix of the keys that is here; each one's last chunk carries its digest."""
        if len(request.keys) > MAX_POSITIONS or any(len(key) != KEY_BYTES for key in request.keys):
            await abort_with(context, InvalidRequestError(f"up to {MAX_POSITIONS} keys of {KEY_BYTES} bytes", "keys"))
        for index, key in enumerate(request.keys):
            block = self._block(BlockKey(key))
            if block is None:
                return
            for chunk in block_chunks(index, block):
                if chunk.offset + len(chunk.data) == len(block) and len(block) % WORD_BYTES == 0:
                    chunk.digest = digest_blocks(block.reshape(1, -1))[0]
                yield chunk

    def _block(self, key: BlockKey) -> npt.NDArray[np.uint8] | None:
        """A copy of a block, so that a slow reader holds no slot; it counts as a use."""
        region = self._regions.find(key)
        if region is None:
            return None
        slots = region.tier.lookup([key])
        block = np.frombuffer(region.block(slots[0]), dtype=np.uint8)
        region.tier.unpin(slots)
        return block

    async def Describe(self, request: types_pb2.DescribeRequest, context: Context) -> kvstore_pb2.PoolInfo:
        return kvstore_pb2.PoolInfo(worker_id="agent", transports=["tcp"])

    async def Renew(self, request: kvstore_pb2.LeaseRequest, context: Context) -> kvstore_pb2.LeaseReply:
        return kvstore_pb2.LeaseReply(held=False)

    async def Release(self, request: kvstore_pb2.LeaseRequest, context: Context) -> kvstore_pb2.LeaseReply:
        return kvstore_pb2.LeaseReply(held=False)

    async def Read(self, request: kvstore_pb2.ReadRequest, context: Context) -> AsyncIterator[kvstore_pb2.BlockChunk]:
        await abort_with(context, TransferError("a node agent has no leases: ask the worker that granted it"))
        yield kvstore_pb2.BlockChunk()  # never reached; makes this a stream

    async def Watch(self, request: kvstore_pb2.WatchRequest, context: Context) -> AsyncIterator[types_pb2.KvEvent]:
        await abort_with(context, UnavailableError("a node agent publishes no events: watch the workers"))
        yield types_pb2.KvEvent()  # never reached; makes this a stream


def _send_with_fd(writer: asyncio.StreamWriter, message: Any, fd: int) -> None:
    """Streams cannot pass descriptors, so the first reply goes around them; nothing else is under way then."""
    own = os.dup(writer.get_extra_info("socket").fileno())
    with socket.socket(fileno=own) as sock:
        socket.send_fds(sock, [pack(message)], [fd])
