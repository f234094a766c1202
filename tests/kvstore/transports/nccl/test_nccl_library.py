"""The ctypes wrapper of libnccl: layouts, statuses, deadlines. A Python object stands in for the library."""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable
from typing import Any

import pytest

from common.errors import TransferError
from kvstore.transports.nccl.library import Communicator, Config, NcclLibrary, UniqueId, non_blocking_config

NAMES = (
    "ncclGetVersion", "ncclGetUniqueId", "ncclCommInitRankConfig", "ncclCommGetAsyncError", "ncclCommAbort",
    "ncclGroupStart", "ncclGroupEnd", "ncclSend", "ncclRecv", "ncclGetErrorString",
)  # fmt: skip
SUCCESS, SYSTEM_ERROR, IN_PROGRESS, REMOTE_ERROR = 0, 2, 7, 6
ID = bytes(range(128))


class FakeLibrary:
    """C functions that call `on_<name>`, with the argument types that the wrapper has declared."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.statuses: dict[str, int] = {}
        self.state = SUCCESS
        self.seen: list[Any] = []
        for name in NAMES:
            setattr(self, name, Function(self, name))

    def on_call(self, name: str, arguments: tuple[Any, ...]) -> Any:
        self.calls.append(name)
        if name == "ncclGetErrorString":
            return f"status {arguments[0]}".encode()
        if name == "ncclCommInitRankConfig":
            handle, num_ranks, unique_id, rank, config = arguments
            self.seen = [num_ranks, bytes(unique_id.internal), rank, config._obj]
            handle._obj.value = 0x1234
        elif name == "ncclCommGetAsyncError":
            arguments[1]._obj.value = self.state
        elif name == "ncclGetUniqueId":
            ctypes.memmove(arguments[0]._obj.internal, ID, 128)
        elif name == "ncclGetVersion":
            arguments[0]._obj.value = 22809
        elif name in ("ncclSend", "ncclRecv"):
            self.seen = [getattr(each, "value", each) for each in arguments]
        return self.statuses.get(name, SUCCESS)


class Function:
    def __init__(self, library: FakeLibrary, name: str) -> None:
        self.argtypes: list[Any] = []
        self.restype: Any = None
        self._call: Callable[[tuple[Any, ...]], Any] = lambda arguments: library.on_call(name, arguments)

    def __call__(self, *arguments: Any) -> Any:
        assert len(arguments) == len(self.argtypes)
        return self._call(arguments)


def soon() -> float:
    return time.monotonic() + 0.05


def test_structs_are_those_of_the_header() -> None:
    """Offsets that a C compiler gives ncclConfig_t of NCCL 2.18 on a 64-bit machine."""
    assert ctypes.sizeof(UniqueId) == 128
    assert ctypes.sizeof(Config) == 48
    offsets = [getattr(Config, name).offset for name, *_ in Config._fields_]
    assert offsets == [0, 8, 12, 16, 20, 24, 28, 32, 40]
    config = non_blocking_config()
    unset = -(2**31)
    assert (config.size, config.magic, config.version, config.blocking) == (48, 0xCAFEBEEF, 21800, 0)
    assert (config.cga_cluster_size, config.min_ctas, config.max_ctas, config.split_share) == (unset,) * 4
    assert config.net_name is None


def test_a_communicator_is_made_and_used() -> None:
    fake = FakeLibrary()
    library = NcclLibrary(fake)
    assert (library.version, library.unique_id()) == (22809, ID)
    communicator = Communicator(library, ID, 1, soon())
    assert fake.seen[:3] == [2, ID, 1]
    assert fake.seen[3].blocking == 0
    fake.calls.clear()
    fake.statuses["ncclGroupEnd"] = IN_PROGRESS
    communicator.send(0xABC, 512, 0xDEF, soon())
    assert fake.calls == ["ncclGroupStart", "ncclSend", "ncclGroupEnd", "ncclCommGetAsyncError"]
    assert fake.seen == [0xABC, 512, 1, 0, 0x1234, 0xDEF]  # uint8, to rank 0
    communicator.receive(0xABC, 512, 0xDEF, soon())
    communicator.abort()
    communicator.abort()
    assert fake.calls.count("ncclCommAbort") == 1
    with pytest.raises(TransferError, match="has ended"):
        communicator.check()


def test_a_peer_that_does_not_come_costs_the_deadline() -> None:
    fake = FakeLibrary()
    fake.statuses["ncclCommInitRankConfig"] = fake.state = IN_PROGRESS
    with pytest.raises(TransferError, match="does not join"):
        Communicator(NcclLibrary(fake), ID, 0, soon())
    assert fake.calls[-1] == "ncclCommAbort"


def test_a_peer_that_does_not_connect_costs_the_deadline() -> None:
    fake = FakeLibrary()
    communicator = Communicator(NcclLibrary(fake), ID, 0, soon())
    fake.state = IN_PROGRESS
    with pytest.raises(TransferError, match="does not connect"):
        communicator.receive(1, 1, 1, soon())


@pytest.mark.parametrize("name", ["ncclGetUniqueId", "ncclCommInitRankConfig", "ncclSend", "ncclGroupEnd"])
def test_failures_are_transfer_errors_with_the_librarys_words(name: str) -> None:
    fake = FakeLibrary()
    library = NcclLibrary(fake)
    fake.statuses[name] = SYSTEM_ERROR
    with pytest.raises(TransferError, match=f"{name}: status 2"):
        Communicator(library, library.unique_id(), 0, soon()).send(1, 1, 1, soon())
    assert fake.calls.count("ncclGroupStart") == fake.calls.count("ncclGroupEnd")


def test_a_failure_that_shows_later() -> None:
    fake = FakeLibrary()
    communicator = Communicator(NcclLibrary(fake), ID, 0, soon())
    fake.state = REMOTE_ERROR
    with pytest.raises(TransferError, match="status 6"):
        communicator.check()
    fake.statuses["ncclCommAbort"] = SYSTEM_ERROR
    communicator.abort()  # is only logged
