"""What a worker says when its engine process ends while it loads."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path
from typing import Any, cast

import pytest

from common.errors import ConfigError, UnavailableError
from engine.config import EngineConfig
from engine.gpu.config import GpuConfig
from worker.config import WorkerConfig
from worker.engine_client import EngineClient
from worker.frames import Event, pack


@pytest.mark.parametrize(
    ("program", "message"),
    [
        ("import os; os.kill(os.getpid(), 9)", "killed while loading, most likely because host memory ended"),
        ("raise SystemExit(3)", "ended with status 3 while loading"),
    ],
)
async def test_an_engine_that_ends_while_loading_is_explained(
    program: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    start = asyncio.create_subprocess_exec

    async def start_other(*_command: str, **options: Any) -> asyncio.subprocess.Process:
        return await start(sys.executable, "-c", program, **options)

    monkeypatch.setattr(asyncio, "create_subprocess_exec", start_other)
    with pytest.raises(ConfigError, match=message):
        await EngineClient.start(WorkerConfig(), EngineConfig("dry-run"), GpuConfig(), "w", "", str(tmp_path))


async def test_an_engine_that_ends_later_is_heard() -> None:
    reader = asyncio.StreamReader()
    reader.feed_data(pack([Event.STEP, {"load": 1}]) + pack([Event.FAILED, "told to fail"]))
    frames = EngineClient(cast(Any, None), reader, cast(Any, None), cast(Any, None)).frames()
    assert await anext(frames) == {"load": 1}
    with pytest.raises(UnavailableError, match="told to fail"):
        await anext(frames)
