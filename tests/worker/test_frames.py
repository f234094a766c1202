"""Frames between front and engine: whole messages only, however the bytes are cut; the end is noticed."""

from __future__ import annotations

import asyncio
import socket

import pytest

from common.errors import TransferError
from common.token_ids import pack_ids
from kvstore.transports.sockets import HEADER, pack
from kvstore.types import BlockKey, LeaseId
from worker.frames import MAX_FRAME_BYTES, FrameSocket, read_message
from worker.messages import Command, Stage, StepReport, Stop, ToEngine


def test_messages_survive_any_cut() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        link = FrameSocket(ours)
        messages: list[ToEngine] = [Command(pack_ids(range(500))), Stage(LeaseId("a"), 3), Stop()]
        data = b"".join(pack(message) for message in messages)
        received = []
        for start in range(0, len(data), 7):
            theirs.sendall(data[start : start + 7])
            received += link.receive(0.0)
        assert received == messages


def test_receive_waits_no_longer_than_asked() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        link = FrameSocket(ours)
        assert link.receive(0.0) == []
        theirs.sendall(pack(Stop())[:3])  # half a frame is not a message
        assert link.receive(0.01) == []


def test_the_end_of_the_front_raises() -> None:
    ours, theirs = socket.socketpair()
    with ours:
        theirs.close()
        with pytest.raises(ConnectionError):
            FrameSocket(ours).receive(1.0)


@pytest.mark.parametrize(
    ("data", "told"),
    [
        (HEADER.pack(MAX_FRAME_BYTES + 1), "frame of"),
        *((pack(message), "malformed") for message in (["Comand"], ["Command", 1], ["Command"], {}, StepReport())),
    ],
)
def test_what_the_front_never_sends_ends_the_link(data: bytes, told: str) -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        theirs.sendall(data)
        with pytest.raises(TransferError, match=told):
            FrameSocket(ours).receive(1.0)


async def test_the_front_reads_what_the_engine_sends() -> None:
    ours, theirs = socket.socketpair()
    reader, writer = await asyncio.open_unix_connection(sock=ours)
    with theirs:
        report = StepReport(stored=[BlockKey(b"\x00" * 32)])
        FrameSocket(theirs).send(report)
        assert await read_message(reader) == report
    with pytest.raises(EOFError):
        await read_message(reader)
    writer.close()
