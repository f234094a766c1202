"""Patience of readers, so that no test depends on when a peer's thread gets a core."""

from __future__ import annotations

import pytest

from kvstore.tier import agent_client
from kvstore.transport import client, cuda_ipc, lease_client, nixl, service, shm, staging, tcp


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
