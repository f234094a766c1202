"""A communicator on a GPU, and the stream that orders its messages and ends with it."""

from __future__ import annotations

import logging
import threading
import time
from typing import Protocol

import torch
from torch import Tensor

from common.errors import TransferError
from kvstore.transports.cuda_ipc import cuda_memory
from kvstore.transports.nccl.library import Communicator, NcclLibrary
from kvstore.transports.nccl.reader import Link

logger = logging.getLogger("engine")


class Mark(Protocol):
    """A position in the sequence of a link's messages."""

    def query(self) -> bool:
        """Whether all messages before it have arrived or been sent."""


class DeviceLink(Link, Protocol):
    """A communicator with ordered messages. Raises TransferError."""

    def send(self, data: Tensor, deadline: float) -> None: ...

    def receive(self, data: Tensor, deadline: float) -> None: ...

    def mark(self) -> Mark: ...

    def after(self, event: torch.cuda.Event | None) -> None:
        """Make later messages wait for the event."""

    def check(self) -> None:
        """Raise TransferError if the communicator has failed."""

    def abort(self, *kept: Tensor) -> None:
        """See Link. kept: memory that may be written until it has ended."""


class Connector(Protocol):
    """NCCL on one device."""

    gpu: str

    def unique_id(self) -> bytes: ...

    def connect(self, unique_id: bytes, rank: int, deadline: float) -> DeviceLink: ...


class StreamLink:
    """A communicator on a GPU, with its own stream."""

    def __init__(self, communicator: Communicator, device: torch.device) -> None:
        """Raises TransferError."""
        self._communicator = communicator
        self._device = device
        self._address = cuda_memory.create_stream()
        self._stream = torch.cuda.ExternalStream(self._address, device)  # type: ignore[no-untyped-call]
        self._has_ended = False

    def send(self, data: Tensor, deadline: float) -> None:
        self._communicator.send(data.data_ptr(), data.nbytes, self._address, deadline)

    def receive(self, data: Tensor, deadline: float) -> None:
        self._communicator.receive(data.data_ptr(), data.nbytes, self._address, deadline)

    def mark(self) -> Mark:
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(self._stream)
        return event

    def after(self, event: torch.cuda.Event | None) -> None:
        if event is not None:
            self._stream.wait_event(event)

    def check(self) -> None:
        self._communicator.check()

    def abort(self, *kept: Tensor) -> None:
        if not self._has_ended:
            self._has_ended = True
            threading.Thread(target=self._end, args=kept, name="kv-nccl-abort", daemon=True).start()

    def _end(self, *kept: Tensor) -> None:
        began = time.monotonic()
        try:
            with torch.cuda.device(self._device):
                self._communicator.abort()
                self._stream.synchronize()
                cuda_memory.destroy_stream(self._address)
        except torch.AcceleratorError:  # the engine's next call reports it
            logger.exception("the device failed while a communicator ended")
        seconds = time.monotonic() - began
        logger.info("a communicator has ended after %.2f s; %d slots are free", seconds, len(kept))


class NcclConnector:
    """NCCL on one GPU."""

    def __init__(self, library: NcclLibrary, device: torch.device) -> None:
        self._library = library
        self._device = device
        self.gpu = str(torch.cuda.get_device_properties(device).uuid)

    def unique_id(self) -> bytes:
        with torch.cuda.device(self._device):
            return self._library.unique_id()

    def connect(self, unique_id: bytes, rank: int, deadline: float) -> StreamLink:
        with torch.cuda.device(self._device):
            communicator = Communicator(self._library, unique_id, rank, deadline)
            try:
                return StreamLink(communicator, self._device)
            except TransferError:
                communicator.abort()
                raise
