"""Draining workers over HTTP, and who is authorized to."""

from __future__ import annotations

import time

import router.drains  # noqa: F401  what tests/wings.py sees: this file goes with the wing
from protos import types_pb2 as pb
from tests.harness.router import cluster
from tests.router.several_models.test_several_models import both


async def test_drain_takes_a_worker_out_of_rotation() -> None:
    async with cluster(num_decode=2) as c:
        assert (await c.http.post("/v1/workers/d0/drain")).json() == {
            "id": "d0", "draining": True, "open_requests": 0,
        }  # fmt: skip
        await c.until(lambda: len(c.model.workers.usable("decode")) == 1)
        await c.chat()
        assert not c.decode[0].submits
        assert (await c.http.post("/v1/workers/nobody/drain")).status_code == 404
        refused = await c.http.post("/v1/workers/d1/drain")
        assert refused.status_code == 409
        assert "d1 is the only decode worker of dry-run: add ?force=true" in refused.json()["error"]["message"]
        assert (await c.http.post("/v1/workers/d1/drain?force=maybe")).status_code == 400
        assert (await c.http.post("/v1/workers/d1/drain", headers={"Origin": "http://page"})).status_code == 401
        assert (await c.http.post("/v1/workers/d0/undrain")).json() == {"id": "d0", "draining": False}
        await c.until(lambda: len(c.model.workers.usable("decode")) == 2)
        assert (await c.http.post("/v1/workers/d1/drain?force=true")).status_code == 200
        await c.chat()
        assert c.decode[0].submits


async def test_the_only_worker_of_a_model_is_kept_though_others_have_more() -> None:
    async with both() as c:
        drain = await c.http.post("/v1/workers/smol-0/drain")  # d0 is of no use to smol
        assert drain.json()["error"]["message"].startswith("smol-0 is the only decode worker of smol")


async def test_the_api_key_allows_it() -> None:
    async with cluster(api_key="sesame") as c:
        good = {"authorization": "Bearer sesame"}
        assert (await c.http.post("/v1/workers/d0/drain?force=true")).status_code == 401
        assert (await c.http.post("/v1/workers/d0/drain?force=true", headers=good)).status_code == 200


async def test_reports_from_before_a_drain_or_its_end_change_nothing() -> None:
    async with cluster(num_decode=2) as c:
        link = c.gateway.workers.find("d0")
        assert link is not None
        late = pb.StepReport(load=pb.LoadReport(draining=False, num_drain_changes=0))
        assert (await c.http.post("/v1/workers/d0/drain")).status_code == 200
        link.apply(late)  # it was on its way while the worker answered
        assert (link.state(time.monotonic()), link.is_usable) == ("draining", False)
        late = pb.StepReport(load=pb.LoadReport(draining=True, num_drain_changes=1))
        assert (await c.http.post("/v1/workers/d0/undrain")).status_code == 200
        link.apply(late)
        assert (link.state(time.monotonic()), link.is_usable) == ("ready", True)
