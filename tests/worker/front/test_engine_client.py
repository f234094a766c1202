"""Errors of a worker whose engine process ends while it loads."""

from __future__ import annotations

import asyncio
import sys
from typing import Any

import pytest

from common.errors import ConfigError, UnavailableError
from engine.config import EngineConfig, GpuConfig
from kvstore.transports.sockets import pack
from worker.config import WorkerConfig
from worker.front.engine_client import EngineClient
from worker.messages import Failed, Start, StepReport, Stop


def start_instead(program: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Start this program in place of the engine process."""
    start = asyncio.create_subprocess_exec

    async def start_other(*_command: str, **options: Any) -> asyncio.subprocess.Process:
        return await start(sys.executable, "-c", program, **options)

    monkeypatch.setattr(asyncio, "create_subprocess_exec", start_other)


@pytest.mark.parametrize(
    ("program", "message"),
    [
        ("import os; os.kill(os.getpid(), 9)", "killed while loading, most likely because host memory ended"),
        ("raise SystemExit(3)", "ended with status 3 while loading"),
    ],
)
async def test_an_engine_that_ends_while_loading_is_explained(
    program: str, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    start_instead(program, monkeypatch)
    with pytest.raises(ConfigError, match=message):
        await EngineClient.start(Start(WorkerConfig(), EngineConfig("dry-run"), GpuConfig(), ""))


async def test_an_engine_that_ends_later_is_heard() -> None:
    reader = asyncio.StreamReader()
    report = StepReport(load=b"unread")
    reader.feed_data(pack(report) + pack(Failed("told to fail")))
    missing: Any = None
    reports = EngineClient(missing, missing, missing, reader, missing).reports()
    assert await anext(reports) == report
    with pytest.raises(UnavailableError, match="told to fail"):
        await anext(reports)


@pytest.mark.parametrize("data", [b"", b"\x05\0\0\0", pack(["StepReport", "no list"]), pack(Stop())])
async def test_an_engine_that_sends_nonsense_is_gone(data: bytes) -> None:
    reader = asyncio.StreamReader()
    reader.feed_data(data)
    reader.feed_eof()
    missing: Any = None
    with pytest.raises(UnavailableError, match="gone"):
        await anext(EngineClient(missing, missing, missing, reader, missing).reports())
