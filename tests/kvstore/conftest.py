"""Patience of readers, so that no test depends on when a peer's thread gets a core."""

from __future__ import annotations

import pytest

from kvstore.tier import agent_client
from kvstore.transports import client, lease_client, service, staging
from kvstore.transports.cuda_ipc import reader as cuda_ipc
from kvstore.transports.nixl import reader as nixl
from kvstore.transports.shm import reader as shm
from kvstore.transports.tcp import reader as tcp


@pytest.fixture(autouse=True)
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """A minute for what takes microseconds on a quiet machine; tests of what gives up set less."""
    for module, name in (
        (agent_client, "CALL_SECONDS"),
        (agent_client, "RECONNECT_SECONDS"),
        (client, "FALLBACK_SECONDS"),
        (cuda_ipc, "FETCH_SECONDS"),
        (lease_client, "CALL_SECONDS"),
        (nixl, "TRANSFER_SECONDS"),
        (service, "FETCH_SECONDS"),
        (shm, "FETCH_SECONDS"),
        (staging, "STAGE_SECONDS"),
        (tcp, "CONNECT_SECONDS"),
    ):
        assert getattr(module, name) > 0.0
        monkeypatch.setattr(module, name, 60.0)
