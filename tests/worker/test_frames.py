"""Frames between front and engine: whole messages only, however the bytes are cut; the end is noticed."""

from __future__ import annotations

import asyncio
import socket
from typing import Any

import pytest

from worker.frames import HEADER, MAX_FRAME_BYTES, FrameSocket, pack, read_frame


def test_messages_survive_any_cut() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        link = FrameSocket(ours)
        messages: list[list[Any]] = [["submit", "a", {"prompt": list(range(500))}], ["cancel", "a"], ["stop"]]
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
        theirs.sendall(pack(["stop"])[:3])  # half a frame is not a message
        assert link.receive(0.01) == []


def test_the_end_of_the_front_raises() -> None:
    ours, theirs = socket.socketpair()
    with ours:
        theirs.close()
        with pytest.raises(ConnectionError):
            FrameSocket(ours).receive(1.0)


def test_a_frame_beyond_the_bound_ends_the_link() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        theirs.sendall(HEADER.pack(MAX_FRAME_BYTES + 1))
        with pytest.raises(ConnectionError, match="frame of"):
            FrameSocket(ours).receive(1.0)


async def test_the_front_reads_what_the_engine_sends() -> None:
    ours, theirs = socket.socketpair()
    reader, writer = await asyncio.open_unix_connection(sock=ours)
    with theirs:
        FrameSocket(theirs).send(["step", {"stored": [b"\x00" * 32]}])
        assert await read_frame(reader) == ["step", {"stored": [b"\x00" * 32]}]
    with pytest.raises(asyncio.IncompleteReadError):
        await read_frame(reader)
    writer.close()
