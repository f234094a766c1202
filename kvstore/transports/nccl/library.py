"""libnccl through ctypes: communicators of two ranks, with non-blocking calls that end by a deadline.

    library = nccl_library()                                       # None if there is none
    communicator = Communicator(library, unique_id, rank, deadline)
    communicator.send(address, num_bytes, stream, deadline)        # enqueued on a CUDA stream
    communicator.abort()                                           # ends its kernels, too

Uses the library that torch brings and has loaded. Knows neither tensors nor blocks; the caller has made its device
the current one. One thread at a time calls a communicator, and none after `abort`.
"""

from __future__ import annotations

import ctypes
import importlib.util
import logging
import time
from collections.abc import Callable
from ctypes import POINTER, byref, c_char_p, c_int, c_size_t, c_uint, c_uint8, c_void_p
from functools import cache
from pathlib import Path
from typing import Any

from common.errors import TransferError

logger = logging.getLogger(__name__)
UNIQUE_ID_BYTES = 128
SUCCESS, IN_PROGRESS = 0, 7  # ncclResult_t
UINT8 = 1  # ncclDataType_t
UNDEFINED = -(1 << 31)  # NCCL_CONFIG_UNDEF_INT
CONFIG_MAGIC = 0xCAFEBEEF
CONFIG_VERSION = 21800  # of NCCL 2.18: newer libraries accept its fields and fill in their own
SPIN_SECONDS = 0.002
POLL_SECONDS = 0.0002


class UniqueId(ctypes.Structure):
    """ncclUniqueId, which is passed by value."""

    _fields_ = (("internal", c_uint8 * UNIQUE_ID_BYTES),)


class Config(ctypes.Structure):
    """ncclConfig_t of CONFIG_VERSION. `size` is its length, so that newer libraries do not read beyond it."""

    _fields_ = (
        ("size", c_size_t), ("magic", c_uint), ("version", c_uint), ("blocking", c_int), ("cga_cluster_size", c_int),
        ("min_ctas", c_int), ("max_ctas", c_int), ("net_name", c_char_p), ("split_share", c_int),
    )  # fmt: skip


def non_blocking_config() -> Config:
    """Return NCCL_CONFIG_INITIALIZER with blocking = 0."""
    unset = UNDEFINED
    return Config(ctypes.sizeof(Config), CONFIG_MAGIC, CONFIG_VERSION, 0, unset, unset, unset, None, unset)


class NcclLibrary:
    """Checked calls of a library. handle: the loaded library, or a test's substitute."""

    def __init__(self, handle: Any) -> None:
        self._handle = handle
        for name, *arguments in (
            ("ncclGetVersion", POINTER(c_int)),
            ("ncclGetUniqueId", POINTER(UniqueId)),
            ("ncclCommInitRankConfig", POINTER(c_void_p), c_int, UniqueId, c_int, POINTER(Config)),
            ("ncclCommGetAsyncError", c_void_p, POINTER(c_int)),
            ("ncclCommAbort", c_void_p),
            ("ncclGroupStart",),
            ("ncclGroupEnd",),
            ("ncclSend", c_void_p, c_size_t, c_int, c_int, c_void_p, c_void_p),
            ("ncclRecv", c_void_p, c_size_t, c_int, c_int, c_void_p, c_void_p),
        ):
            function = getattr(handle, name)
            function.argtypes, function.restype = arguments, c_int
        handle.ncclGetErrorString.argtypes, handle.ncclGetErrorString.restype = [c_int], c_char_p

    @property
    def version(self) -> int:
        number = c_int()
        self.call("ncclGetVersion", byref(number))
        return number.value

    def unique_id(self) -> bytes:
        """Return the name of a new communicator, and start a thread in this process where its ranks meet."""
        unique_id = UniqueId()
        self.call("ncclGetUniqueId", byref(unique_id))
        return bytes(unique_id.internal)

    def call(self, name: str, *arguments: Any) -> int:
        """Call a function; return SUCCESS or IN_PROGRESS. Raises TransferError."""
        status: int = getattr(self._handle, name)(*arguments)
        self.check(name, status)
        return status

    def check(self, name: str, status: int) -> None:
        if status not in (SUCCESS, IN_PROGRESS):
            text = self._handle.ncclGetErrorString(status) or b"unknown error"
            raise TransferError(f"{name}: {text.decode(errors='replace')}")


class Communicator:
    """This process's rank, 0 or 1, in a communicator of two."""

    def __init__(self, library: NcclLibrary, unique_id: bytes, rank: int, deadline: float) -> None:
        """Wait for the other rank. Raises TransferError if it has not joined by `deadline` (time.monotonic)."""
        self._library = library
        self._peer = 1 - rank
        self._handle = c_void_p()
        self._config = non_blocking_config()  # must live while the library starts
        name = UniqueId.from_buffer_copy(unique_id)
        try:
            library.call("ncclCommInitRankConfig", byref(self._handle), 2, name, rank, byref(self._config))
            self._settle("the peer does not join", deadline)
        except TransferError:
            self.abort()
            raise

    def send(self, address: int, num_bytes: int, stream: int, deadline: float) -> None:
        """Enqueue a message to the other rank. Raises TransferError."""
        self._transfer("ncclSend", address, num_bytes, stream, deadline)

    def receive(self, address: int, num_bytes: int, stream: int, deadline: float) -> None:
        """Enqueue the receipt of a message of this length. Raises TransferError."""
        self._transfer("ncclRecv", address, num_bytes, stream, deadline)

    def check(self) -> None:
        """Raise TransferError if the communicator has failed."""
        self._state()

    def abort(self) -> None:
        """End it, and its kernels on the device. May take a while; may be called repeatedly."""
        handle, self._handle = self._handle, c_void_p()
        if handle.value:
            try:
                self._library.call("ncclCommAbort", handle)
            except TransferError as error:
                logger.warning("a communicator does not end: %s", error)

    def _transfer(self, name: str, address: int, num_bytes: int, stream: int, deadline: float) -> None:
        library = self._library
        library.call("ncclGroupStart")
        try:
            library.call(name, address, num_bytes, UINT8, self._peer, self._open(), stream)
        finally:
            library.call("ncclGroupEnd")  # also after a failure: the thread's group must not stay open
        self._settle("the peer does not connect", deadline)

    def _settle(self, trouble: str, deadline: float) -> None:
        """Wait until the host's part of the last call is done."""
        if not poll_until(lambda: self._state() == SUCCESS, deadline):
            raise TransferError(trouble)

    def _state(self) -> int:
        state = c_int()
        self._library.call("ncclCommGetAsyncError", self._open(), byref(state))
        self._library.check("NCCL", state.value)
        return state.value

    def _open(self) -> c_void_p:
        if not self._handle.value:
            raise TransferError("the communicator has ended")
        return self._handle


def poll_until(condition: Callable[[], bool], deadline: float) -> bool:
    """Wait for a condition, spinning first, as most transfers take less than a sleep. False at the deadline."""
    spin_until = time.monotonic() + SPIN_SECONDS
    while not condition():
        now = time.monotonic()
        if now > deadline:
            return False
        time.sleep(0.0 if now < spin_until else POLL_SECONDS)
    return True


@cache
def nccl_library() -> NcclLibrary | None:
    """Return the library that torch has loaded or brings; None if there is none or it is too old."""
    for path in ("libnccl.so.2", *_packaged()):
        try:
            library = NcclLibrary(ctypes.CDLL(path))
        except (OSError, AttributeError) as error:
            logger.debug("no NCCL in %s: %s", path, error)
            continue
        if library.version >= CONFIG_VERSION:
            return library
    return None


def _packaged() -> list[str]:
    """Return the path of the library in NVIDIA's Python package, a dependency of torch's wheel."""
    try:
        spec = importlib.util.find_spec("nvidia.nccl")
    except ModuleNotFoundError:
        return []
    folders = spec.submodule_search_locations if spec is not None else None
    return [str(Path(folder) / "lib" / "libnccl.so.2") for folder in folders or ()]
