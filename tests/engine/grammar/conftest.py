"""Grammars of tests may take their time: on a busy machine a mask takes several times as long."""

from __future__ import annotations

import pytest

from engine.grammar import grammars, mask_thread


@pytest.fixture(autouse=True)
def patience(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Raise the limits of processor time, except in tests of these limits."""
    if request.path.name != "test_mask_thread.py":
        monkeypatch.setattr(mask_thread, "FREE_SECONDS", 1.0)
        monkeypatch.setattr(grammars, "ANSWER_SECONDS", 10.0)
