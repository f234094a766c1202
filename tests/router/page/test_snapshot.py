"""Figures of the page, from links and logs."""

from __future__ import annotations

import time
from typing import Any

import pytest

from protos import types_pb2 as pb
from router.page.snapshot import COLUMNS, Before, figures, worker_facts, worker_figures
from router.workers.worker_link import WorkerLink
from tests.harness.router import cluster


def shown(link: WorkerLink, now: float, **rates: float) -> dict[str, Any]:
    found = worker_figures(link, now, rates.get("decode", 0.0), rates.get("prefill", 0.0))
    return dict(zip(COLUMNS, found, strict=True))


def test_a_worker_that_is_not_there_yet() -> None:
    link = WorkerLink("decode", "10.0.0.7:9000")
    facts = worker_facts(link, "a-model")
    assert (facts["id"], facts["host"], facts["role"]) == ("10.0.0.7:9000", "10.0.0.7", "decode")
    assert shown(link, 0.0)["state"] == "connecting"


def test_figures_are_those_of_the_last_report() -> None:
    link = WorkerLink("decode", "10.0.0.7:9000")
    load = pb.LoadReport(
        num_running=3, num_waiting=2, num_swapped=1, num_leases=4, kv_blocks_total=100, kv_blocks_free=30,
        kv_blocks_cached=20, num_steps=7, step_seconds=0.0125, step_decode_tokens=3,
    )  # fmt: skip
    link.apply(pb.StepReport(load=load))
    now = shown(link, link.last_step, decode=240.04)
    assert (now["running"], now["waiting"], now["leases"]) == (3, 3, 4)
    assert (now["blocks"], now["free"], now["cached"]) == (100, 30, 20)
    assert (now["step_ms"], now["decode_rate"]) == (12.5, 240.0)
    assert shown(link, link.last_step + 10.0)["step_ms"] == 0  # of a step long ago


async def test_rates_are_tokens_between_two_snapshots() -> None:
    async with cluster(num_decode=1) as c:
        [link] = c.gateway.workers.links
        start = time.monotonic()
        first, before = figures(c.gateway, Before(), start)
        assert dict(zip(COLUMNS, first["workers"][0], strict=True))["decode_rate"] == 0
        link.rates.num_decoded += 50
        second, before = figures(c.gateway, before, start + 0.5)
        assert dict(zip(COLUMNS, second["workers"][0], strict=True))["decode_rate"] == pytest.approx(100.0)
        link.rates.num_decoded = 3  # the worker is another one
        third, _ = figures(c.gateway, before, start + 1.5)
        assert dict(zip(COLUMNS, third["workers"][0], strict=True))["decode_rate"] == 0
