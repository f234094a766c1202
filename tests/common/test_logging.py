"""Lines that strangers can cause do not fill the log; lines about a request name it."""

from __future__ import annotations

import logging
from types import SimpleNamespace

import pytest

from common.logging import RateLimit, TextFormatter, about


def test_each_line_of_code_has_its_share(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr("common.logging.time", SimpleNamespace(monotonic=lambda: now[0]))
    monkeypatch.setattr("common.logging.MAX_LINES", 3)
    logger = logging.Logger("limited")
    logger.addHandler(caplog.handler)
    logger.addFilter(RateLimit())

    def say(number: int) -> None:
        logger.warning("%d from a stranger", number)

    for number in range(50):
        say(number)
    logger.warning("something else")
    assert caplog.messages == ["0 from a stranger", "1 from a stranger", "2 from a stranger", "something else"]
    caplog.clear()
    now[0] += 10.0
    say(51)
    say(52)
    assert caplog.messages == ["51 from a stranger (47 more like this were left out)", "52 from a stranger"]
    caplog.clear()
    now[0] += 10.0
    say(53)
    assert caplog.messages == ["53 from a stranger"]


def test_a_line_about_a_request_has_its_id() -> None:
    request_id = "chatcmpl-" + "0123456789" * 3 + "12"
    assert [about(name) for name in (request_id, f"{request_id}-0", f"{request_id}-12.3")] == [
        {"request_id": request_id}
    ] * 3
    assert about("") == {}
    record = logging.makeLogRecord({"name": "x", "levelname": "INFO", "msg": "KV pull failed", **about(request_id)})
    assert TextFormatter().format(record).endswith(f"I x | KV pull failed [{request_id}]")
    record.msg = f"{request_id}-0 moves"
    assert TextFormatter().format(record).endswith(f"| {request_id}-0 moves")
