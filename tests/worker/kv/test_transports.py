"""Transports are found by name; those of wings that are not here are left out."""

from __future__ import annotations

import pytest

from common.errors import ConfigError
from worker.kv.transports import AUTO, TRANSPORTS, load_transports


def test_absent_transports_are_left_out_or_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    before = [kind.name for kind in load_transports(AUTO)]
    assert {"cuda_ipc", "shm", "tcp"} <= set(before)
    monkeypatch.setitem(TRANSPORTS, "pigeon", "kvstore.transports.pigeon.reader:PigeonTransport")
    assert [kind.name for kind in load_transports("shm")] == before
    with pytest.raises(ConfigError, match=r"^--kv-transport pigeon needs kvstore\.transports\.pigeon\.reader"):
        load_transports("pigeon")
