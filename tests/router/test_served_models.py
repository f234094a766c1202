"""A served model takes its workers under any name, and shares them with its adapters."""

from __future__ import annotations

import pytest

from common.token_ids import pack_ids
from protos import types_pb2 as pb
from tests.harness.router import cluster

LONG = "a shared beginning that is long enough for several blocks " * 2


async def test_with_one_model_a_workers_name_for_it_does_not_matter() -> None:
    async with cluster(info={"model": "the-same-files-elsewhere"}) as c:
        assert (await c.chat()).status_code == 200


@pytest.mark.wing("router.completions_api")
async def test_an_adapter_goes_to_the_block_key_and_to_every_leg() -> None:
    async with cluster(num_decode=2, adapters=["poet"]) as c:
        await c.complete(LONG)
        await c.until(lambda: c.model.workers.index.num_keys > 0)
        prompt = pack_ids(LONG.encode())
        assert c.model.workers.cached_tokens(prompt, pb.Submit())
        assert c.model.workers.cached_tokens(prompt, pb.Submit(adapter="poet")) == {}
        assert c.model.workers.cached_tokens(prompt, pb.Submit(cache_salt="other tenant")) == {}
        for worker in c.decode:
            worker.script.die_after_tokens = worker.num_tokens + 4
        assert (await c.complete(LONG, model="dry-run:poet")).json()["model"] == "dry-run:poet"
        submits = sorted((s for w in c.decode for s in w.submits), key=lambda s: len(s.output_token_ids))
        assert [submit.adapter for submit in submits[:2]] in (["", "poet"], ["poet", ""])
        assert len(submits) > 2
        assert {submit.adapter for submit in submits[2:]} == {"poet"}  # after a migration, too
        await c.until(lambda: bool(c.model.workers.cached_tokens(prompt, pb.Submit(adapter="poet"))))
        assert (await c.complete(LONG, model="dry-run:painter")).status_code == 404
        assert [model.id async for model in c.openai.models.list()] == ["dry-run", "dry-run:poet"]
