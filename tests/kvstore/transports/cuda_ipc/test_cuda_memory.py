"""Mapping GPU memory: nothing stays mapped, reserved or held when the driver refuses. The driver is a stand-in."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from common.errors import ConfigError, TransferError
from kvstore.transports.cuda_ipc import cuda_memory

GRANULARITY = 2 << 20


class Driver:
    """Counts held resources. `fails` names the call that fails, and its status."""

    def __init__(self) -> None:
        self.fails: tuple[str, int] = ("", 0)
        self.handles = self.addresses = self.mappings = 0
        self.sizes: list[int] = []
        self.access: list[int] = []

    def __getattr__(self, name: str) -> Callable[..., int]:
        if not name.startswith("cu"):
            raise AttributeError(name)

        def call(*arguments: Any) -> int:
            if name == self.fails[0]:
                return self.fails[1]
            self._note(name, arguments)
            return 0

        return call

    def cuGetErrorName(self, status: int, name: Any) -> int:
        name._obj.value = b"CUDA_ERROR_NO_SUCH_THING"
        return 0

    def _note(self, name: str, arguments: tuple[Any, ...]) -> None:
        out: Any = getattr(arguments[0], "_obj", None)
        match name:
            case "cuMemGetAllocationGranularity":
                out.value = GRANULARITY
            case "cuDeviceGetAttribute":
                out.value = 1
            case "cuMemCreate" | "cuMemImportFromShareableHandle":
                out.value = 77
                self.handles += 1
            case "cuMemRelease":
                self.handles -= 1
            case "cuMemAddressReserve":
                out.value = 1 << 40
                self.addresses += 1
                self.sizes.append(arguments[1].value)
            case "cuMemAddressFree":
                self.addresses -= 1
            case "cuMemMap":
                self.mappings += 1
            case "cuMemUnmap":
                self.mappings -= 1
            case "cuMemSetAccess":
                self.access.append(ctypes.cast(arguments[2], ctypes.POINTER(ctypes.c_int))[2])
            case "cuMemExportToShareableHandle":
                out.value = os.open("/dev/null", os.O_RDONLY)

    @property
    def held(self) -> tuple[int, int, int]:
        return self.handles, self.addresses, self.mappings


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Iterator[Driver]:
    driver = Driver()
    monkeypatch.setattr(cuda_memory, "_driver", lambda: driver)
    yield driver
    assert driver.held == (0, 0, 0)


def test_memory_is_made_mapped_and_handed_out(driver: Driver) -> None:
    assert cuda_memory.can_share(0)
    memory, fd = cuda_memory.create(0, 3 << 20)
    os.close(fd)
    assert (memory.num_bytes, driver.sizes, driver.access) == (3 << 20, [2 * GRANULARITY], [cuda_memory.READ_WRITE])
    assert driver.held == (0, 1, 1)  # the handle is not needed any more
    memory.close()
    memory.close()  # twice is fine
    assert memory.address == 0


def test_a_peers_memory_is_mapped_for_reading(driver: Driver) -> None:
    memory = cuda_memory.attach(1, 5, GRANULARITY)
    assert (driver.sizes, driver.access) == ([GRANULARITY], [cuda_memory.READ])
    assert driver.held == (0, 1, 1)
    memory.close()


@pytest.mark.parametrize(
    "call", ["cuMemImportFromShareableHandle", "cuMemAddressReserve", "cuMemMap", "cuMemSetAccess"]
)
def test_what_cannot_be_mapped_is_an_error_and_leaves_nothing(driver: Driver, call: str) -> None:
    driver.fails = (call, 801)
    with pytest.raises(TransferError, match=f"{call}: CUDA_ERROR_NO_SUCH_THING"):
        cuda_memory.attach(0, 5, GRANULARITY)


@pytest.mark.parametrize(
    "call", ["cuMemCreate", "cuMemAddressReserve", "cuMemMap", "cuMemSetAccess", "cuMemExportToShareableHandle"]
)
def test_what_cannot_be_made_is_an_error_and_leaves_nothing(driver: Driver, call: str) -> None:
    driver.fails = (call, 801)
    with pytest.raises(ConfigError, match="can be shared"):
        cuda_memory.create(0, GRANULARITY)


def test_too_little_memory_is_named(driver: Driver) -> None:
    driver.fails = ("cuMemCreate", cuda_memory.OUT_OF_MEMORY)
    with pytest.raises(ConfigError, match=r"90\.00 GB are not free on GPU 0"):
        cuda_memory.create(0, 90 * 10**9)


def test_a_device_that_cannot_export_is_known(driver: Driver) -> None:
    driver.fails = ("cuDeviceGetAttribute", 1)
    assert not cuda_memory.can_share(0)
