"""Patience of readers, so that no test depends on when a peer's thread gets a core."""

from __future__ import annotations

from importlib import import_module

import pytest

from common.wings import has_wing


@pytest.fixture(autouse=True)
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """Allow a minute for calls that take microseconds on a quiet machine; tests of time limits set less."""
    for path, name in (
        ("kvstore.tier.agent_client", "CALL_SECONDS"),
        ("kvstore.tier.agent_client", "RECONNECT_SECONDS"),
        ("kvstore.transports.fallbacks.client", "FALLBACK_SECONDS"),
        ("kvstore.transports.cuda_ipc.reader", "FETCH_SECONDS"),
        ("kvstore.transports.kv_transfer", "CALL_SECONDS"),
        ("kvstore.transports.nixl.reader", "TRANSFER_SECONDS"),
        ("kvstore.transports.shm", "FETCH_SECONDS"),
        ("worker.gpu_hand_off.staging_table", "STAGE_SECONDS"),
        ("kvstore.transports.tcp.reader", "CONNECT_SECONDS"),
        ("kvstore.transports.tcp.service", "FETCH_SECONDS"),
    ):
        if has_wing(path):
            module = import_module(path)
            assert getattr(module, name) > 0.0
            monkeypatch.setattr(module, name, 60.0)
