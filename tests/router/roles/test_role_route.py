"""Changing a worker's role over HTTP, and who is authorized to."""

from __future__ import annotations

from typing import Any

import httpx

import router.roles  # noqa: F401  what tests/wings.py sees: this file goes with the wing
from tests.harness.router import Cluster, cluster


async def change(c: Cluster, worker: str, role: Any, **headers: str) -> httpx.Response:
    return await c.http.post(f"/v1/workers/{worker}/role", json={"role": role}, headers=headers)


async def test_workers_swap_their_roles() -> None:
    async with cluster(num_prefill=1, num_decode=2, local_prefill_tokens=0) as c:
        [p0], [d0, d1] = c.prefill, c.decode
        await c.chat()
        assert (len(p0.submits), len(d0.submits) + len(d1.submits)) == (1, 1)
        answer = await change(c, "d0", "prefill")
        assert answer.json() == {"id": "d0", "role": "prefill", "started_as": "decode"}
        assert (await change(c, "p0", "decode")).json()["role"] == "decode"
        assert (await change(c, "d1", "prefill")).status_code == 200
        for worker in (p0, d0, d1):
            worker.submits.clear()
        text = (await c.chat(seed=3)).json()["choices"][0]["message"]["content"]
        [prompt] = d0.submits + d1.submits
        [rest] = p0.submits
        assert (prompt.keep, rest.keep, rest.kv_handle.worker_id in ("d0", "d1")) == (False, True, True)
        assert (await c.http.get("/healthz")).json()["roles"] == {"prefill": 2, "decode": 1}
        assert (await change(c, "d0", "decode")).json()["started_as"] == "decode"
        assert (await c.chat(seed=3)).json()["choices"][0]["message"]["content"] == text


async def test_a_role_outlives_the_workers_connection() -> None:
    async with cluster(num_decode=2) as c:
        await change(c, "d0", "prefill")
        [link] = [link for link in c.gateway.workers.links if link.worker_id == "d0"]
        await c.decode[0].kill()
        await c.until(lambda: link.info is None)
        await c.decode[0].start()
        await c.until(lambda: link.is_usable)
        assert [link.worker_id for link in c.model.workers.usable("prefill")] == ["d0"]


async def test_what_would_serve_nothing_is_refused() -> None:
    async with cluster(num_decode=2) as c:
        assert (await change(c, "nobody", "prefill")).status_code == 404
        for role in ("both", None):
            assert (await change(c, "d0", role)).status_code == 400
        assert (await change(c, "d0", "prefill", origin="http://page")).status_code == 401
        assert (await change(c, "d0", "prefill")).status_code == 200
        refused = await change(c, "d1", "prefill")
        assert refused.status_code == 409
        assert "d1 is the only decode worker of dry-run" in refused.json()["error"]["message"]
    async with cluster(num_decode=2, info={"transports": []}) as c:
        refused = await change(c, "d0", "prefill")
        assert (refused.status_code, "can only decode" in refused.json()["error"]["message"]) == (409, True)
