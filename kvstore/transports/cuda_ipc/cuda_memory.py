"""GPU memory that processes share through a file descriptor: CUDA virtual memory, exported.

The device counterpart of `kvstore.transports.shared_memory`. Physical memory lives as long as it is mapped: a mapping
of a dead process's pool stays readable, and the memory is freed with the last mapping. Calls libcuda through ctypes,
and requires that the caller's framework has created the device's primary context. Knows neither tensors nor blocks.
"""

from __future__ import annotations

import contextlib
import ctypes
from ctypes import POINTER, byref, c_char_p, c_int, c_size_t, c_ubyte, c_uint, c_uint64, c_ushort, c_void_p
from functools import cache
from typing import Any

from common.errors import ConfigError, TransferError

PINNED, ON_DEVICE, POSIX_FD = 1, 1, 1  # CUmemAllocationType, CUmemLocationType, CUmemAllocationHandleType
READ, READ_WRITE = 1, 3  # CUmemAccess_flags
SUPPORTS_POSIX_FD = 103  # CUdevice_attribute
NON_BLOCKING = 1  # CUstream_flags
OUT_OF_MEMORY = 2  # CUresult


class _Location(ctypes.Structure):
    _fields_ = (("type", c_int), ("id", c_int))


class _AllocationFlags(ctypes.Structure):
    _fields_ = (
        ("compression", c_ubyte), ("rdma_capable", c_ubyte), ("usage", c_ushort), ("reserved", c_ubyte * 4)
    )  # fmt: skip


class _AllocationProp(ctypes.Structure):
    _fields_ = (
        ("type", c_int), ("handle_types", c_int), ("location", _Location), ("win32", c_void_p),
        ("flags", _AllocationFlags),
    )  # fmt: skip


class _AccessDesc(ctypes.Structure):
    _fields_ = (("location", _Location), ("flags", c_int))


class CudaError(Exception):
    """A driver call that failed. Never leaves this module."""

    def __init__(self, name: str, status: int) -> None:
        super().__init__(f"{name}: {_error_name(status)}")
        self.status = status


class CudaMemory:
    """A mapping at `address` (of `num_bytes`, rounded up to the device's granularity). `close` ends it, once.

    The caller makes sure that the device no longer uses it.
    """

    def __init__(self, device: int, num_bytes: int, handle: int, access: int) -> None:
        """Map the physical memory `handle`, which the caller releases. Raises CudaError."""
        self.num_bytes = num_bytes
        self._size = _rounded(device, num_bytes)
        address = c_uint64()
        _call("cuMemAddressReserve", byref(address), c_size_t(self._size), c_size_t(0), c_uint64(0), c_uint64(0))
        self.address = address.value
        try:
            _call("cuMemMap", address, c_size_t(self._size), c_size_t(0), c_uint64(handle), c_uint64(0))
        except CudaError:
            _call("cuMemAddressFree", address, c_size_t(self._size))
            raise
        try:
            desc = _AccessDesc(_Location(ON_DEVICE, device), access)
            _call("cuMemSetAccess", address, c_size_t(self._size), byref(desc), c_size_t(1))
        except CudaError:
            self.close()
            raise

    def close(self) -> None:
        if self.address:
            address, self.address = c_uint64(self.address), 0
            _call("cuMemUnmap", address, c_size_t(self._size))
            _call("cuMemAddressFree", address, c_size_t(self._size))


def can_share(device: int) -> bool:
    """Whether memory of this device can be shared through a descriptor."""
    try:
        supported = c_int()
        _call("cuDeviceGetAttribute", byref(supported), c_int(SUPPORTS_POSIX_FD), _device(device))
    except CudaError:
        return False
    return bool(supported.value)


def create(device: int, num_bytes: int) -> tuple[CudaMemory, int]:
    """Return uninitialized memory of `num_bytes` on `device`, and its descriptor, which the caller closes.

    Raises ConfigError if the memory is not available.
    """
    prop = _properties(device)
    handle = c_uint64()
    try:
        _call("cuMemCreate", byref(handle), c_size_t(_rounded(device, num_bytes)), byref(prop), c_uint64(0))
    except CudaError as error:
        if error.status == OUT_OF_MEMORY:
            raise ConfigError(f"{num_bytes / 1e9:.2f} GB are not free on GPU {device}") from error
        raise ConfigError(f"GPU {device} gives no memory that can be shared ({error})") from error
    fd = c_int(-1)
    try:
        memory = CudaMemory(device, num_bytes, handle.value, READ_WRITE)
        try:
            _call("cuMemExportToShareableHandle", byref(fd), handle, c_int(POSIX_FD), c_uint64(0))
        except CudaError:
            memory.close()
            raise
    except CudaError as error:
        raise ConfigError(f"GPU {device} gives no memory that can be shared ({error})") from error
    finally:
        _call("cuMemRelease", handle)  # the mapping and the descriptor keep the memory
    return memory, fd.value


def attach(device: int, fd: int, num_bytes: int, writable: bool = False) -> CudaMemory:
    """Map memory that another process shared, for use by `device`. The caller closes the descriptor.

    Raises TransferError if it is not such memory, is shorter than `num_bytes`, or cannot be reached by the device.
    """
    handle = c_uint64()
    try:
        _call("cuMemImportFromShareableHandle", byref(handle), c_void_p(fd), c_int(POSIX_FD))
        try:
            return CudaMemory(device, num_bytes, handle.value, READ_WRITE if writable else READ)
        finally:
            _call("cuMemRelease", handle)
    except CudaError as error:
        raise TransferError(f"GPU {device} cannot map the peer's memory ({error})") from error


def create_stream() -> int:
    """Return a new high-priority stream of the current device. torch's streams are shared: it hands out 32 in turn.

    Raises TransferError.
    """
    stream = c_void_p()
    try:
        _call("cuStreamCreateWithPriority", byref(stream), c_uint(NON_BLOCKING), c_int(-1))
    except CudaError as error:
        raise TransferError(f"the GPU gives no stream ({error})") from error
    return stream.value or 0


def destroy_stream(stream: int) -> None:
    """Destroy a stream without pending work."""
    with contextlib.suppress(CudaError):
        _call("cuStreamDestroy_v2", c_void_p(stream))


def _properties(device: int) -> _AllocationProp:
    return _AllocationProp(PINNED, POSIX_FD, _Location(ON_DEVICE, device), None, _AllocationFlags())


def _rounded(device: int, num_bytes: int) -> int:
    granularity = c_size_t()
    prop = _properties(device)
    _call("cuMemGetAllocationGranularity", byref(granularity), byref(prop), c_int(0))
    return -(-num_bytes // granularity.value) * granularity.value


def _device(ordinal: int) -> c_int:
    device = c_int()
    _call("cuDeviceGet", byref(device), c_int(ordinal))
    return device


def _call(name: str, *arguments: Any) -> None:
    """Call a driver function. Raises CudaError."""
    status = getattr(_driver(), name)(*arguments)
    if status:
        raise CudaError(name, status)


@cache
def _driver() -> Any:
    """Load libcuda. Raises ConfigError if there is no driver."""
    try:
        library = ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        raise ConfigError("this machine has no CUDA driver") from error
    library.cuGetErrorName.argtypes = [c_int, POINTER(c_char_p)]
    if status := library.cuInit(0):
        raise ConfigError(f"the CUDA driver does not start (status {status})")
    return library


def _error_name(status: int) -> str:
    name = c_char_p()
    _driver().cuGetErrorName(status, byref(name))
    return (name.value or b"unknown").decode()
