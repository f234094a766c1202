"""An engine that hangs, while it loads or serves, ends its worker."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any

import pytest

from common.config import from_args
from common.errors import ConfigError, UnavailableError
from engine.config import EngineConfig
from engine.gpu.config import GpuConfig
from tests.worker.front.test_engine_client import start_instead
from worker.config import WorkerConfig
from worker.front.engine_client import EngineClient
from worker.hangs import engine_watch
from worker.hangs.liveness import ThreadSample
from worker.messages import Start


async def test_an_engine_that_does_nothing_while_it_loads_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    start_instead("import time; time.sleep(600)", monkeypatch)  # a network file system hangs
    monkeypatch.setattr(engine_watch, "START_WATCH_SECONDS", 0.1)
    config = from_args(WorkerConfig, ["--start-stall-seconds=1"])
    with pytest.raises(ConfigError, match="done nothing for 1 s while loading"):
        await EngineClient.start(Start(config, EngineConfig("dry-run"), GpuConfig(), ""))


def test_a_worker_ends_when_its_engine_hangs_for_a_minute(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_watch, "sample_process", lambda pid: {"1": ThreadSample("T", 0.0, 0.0)})
    heartbeat: Any = SimpleNamespace(read=lambda: 1)
    watch = engine_watch.EngineWatch(WorkerConfig(), 1, heartbeat)
    began = time.monotonic()
    found = [watch.trouble(began + 0.25 * look) for look in range(1, 200)]
    assert found[0] is None
    assert found[-1] == "the engine process is stopped"
    for look in range(200, 247):
        watch.trouble(began + 0.25 * look)
    with pytest.raises(UnavailableError, match="the engine process is stopped for 60 s"):
        watch.trouble(began + 70.0)
