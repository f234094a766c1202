"""`mini-infer top` and `mini-infer explain`, in front of a router with scripted workers."""

from __future__ import annotations

import asyncio

import pytest

from cli.main import main
from cli.top.frame import journey_bar, kv_bar
from tests.harness.router import cluster


async def test_one_frame_and_one_request(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "160")
    async with cluster(num_prefill=1, num_decode=2, local_prefill_tokens=0) as c:
        answer = (await c.chat()).json()
        url = f"--url=http://127.0.0.1:{c.port}"
        assert await asyncio.to_thread(main, ["top", url, "--once"]) == 0
        shown = capsys.readouterr().out
        for text in ("dry-run", "p0", "d0", "d1", "ready", "length", answer["id"].partition("-")[2][:8]):
            assert text in shown
        assert await asyncio.to_thread(main, ["explain", url, answer["id"]]) == 0
        shown = capsys.readouterr().out
        for text in ("first output on d", "disaggregated", "total", "cost", "in hindsight: "):
            assert text in shown
        assert await asyncio.to_thread(main, ["explain", url, "chatcmpl-unknown"]) == 1
        assert "this request is not known" in capsys.readouterr().err


async def test_a_key_is_asked_for_in_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    async with cluster(api_key="a-key") as c:
        url = f"--url=http://127.0.0.1:{c.port}"
        assert await asyncio.to_thread(main, ["top", url, "--once"]) == 1
        assert "the API key is missing or wrong" in capsys.readouterr().err
        assert await asyncio.to_thread(main, ["top", url, "--once", "--api-key=a-key"]) == 0


def test_no_router_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["top", "--url=http://127.0.0.1:1", "--once"]) == 1
    assert "no server answers at http://127.0.0.1:1" in capsys.readouterr().err


@pytest.mark.parametrize(("used", "cached"), [(0.0, 0.0), (0.5, 0.5), (0.33, 0.33), (1.0, 0.0)])
def test_a_bar_of_blocks_has_one_width(used: float, cached: float) -> None:
    assert len(kv_bar(used, cached).plain) == 20


def test_bars_of_requests_are_drawn_to_one_scale() -> None:
    spans = [("queue", "d0", 0.25), ("decode", "d0", 0.75)]
    assert len(journey_bar(spans, longest=2.0).plain) == 20
    assert len(journey_bar(spans, longest=1.0).plain) == 40
    assert len(journey_bar([("route", "", 0.0)], longest=0.0).plain) == 0
