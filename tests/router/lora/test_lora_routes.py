"""Loading and unloading adapters over HTTP: authorization, refusals, and requests to workers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx
import pytest

from common.errors import ConfigError
from common.lora.adapter_ref import AdapterRef
from common.lora.modules import parse_lora_modules
from protos import types_pb2 as pb
from router.lora.adapters import LoraAdapters
from tests.harness.adapters import write_adapter
from tests.harness.router import Cluster, cluster
from tests.router.several_models.test_several_models import both

pytestmark = pytest.mark.wing("router.lora")
SHAPES = {"model.layers.0.self_attn.q_proj.weight": (8, 8)}


@pytest.fixture
def poet(tmp_path: Path) -> Path:
    return write_adapter(tmp_path / "poet", SHAPES)


async def load(c: Cluster, path: Path, name: str = "poet", **fields: Any) -> httpx.Response:
    return await c.http.post("/v1/load_lora_adapter", json={"lora_name": name, "lora_path": str(path), **fields})


async def unload(c: Cluster, name: str = "poet", **fields: Any) -> httpx.Response:
    return await c.http.post("/v1/unload_lora_adapter", json={"lora_name": name, **fields})


def error_of(answer: httpx.Response) -> tuple[int, str, str | None]:
    error = answer.json()["error"]
    return answer.status_code, error["message"], error["param"]


async def test_every_worker_tries_an_adapter_before_it_is_a_model(poet: Path) -> None:
    async with cluster(num_prefill=1, num_decode=2) as c:
        answer = await load(c, poet)
        assert (answer.status_code, answer.text) == (200, "Success: LoRA adapter 'poet' added successfully.")
        workers = (*c.prefill, *c.decode)
        name = str(AdapterRef.of(poet))
        for worker in workers:
            [submit] = worker.submits
            assert (submit.adapter, submit.sampling.max_tokens) == (name, 1)
        assert not any(link.num_open for link in c.gateway.workers.links)
        card = (await c.http.get("/v1/models/poet")).json()
        assert (card["id"], card["parent"]) == ("poet", "dry-run")
        assert error_of(await load(c, poet)) == (
            400, "The lora adapter 'poet' has already been loaded; load_inplace loads it again.", "lora_name",
        )  # fmt: skip
        assert (await load(c, poet, load_inplace=True)).status_code == 200
        assert (await unload(c)).status_code == 200
        for name in ("poet", "dry-run"):
            assert (await unload(c, name)).status_code == 404


async def test_names_and_bodies_that_are_refused(poet: Path) -> None:
    async with cluster() as c:
        assert error_of(await load(c, poet, "dry-run")) == (400, "'dry-run' is the name of a model", "lora_name")
        assert error_of(await load(c, poet, "a\nb"))[2] == "lora_name"
        assert error_of(await load(c, poet, base_model_name="nobody"))[0] == 404
        assert error_of(await load(c, poet, is_3d_lora_weight=True))[0] == 400
        assert error_of(await load(c, Path("here")))[1:] == (
            "lora_path must be the absolute path of a folder", "lora_path",
        )  # fmt: skip
        assert (await c.http.post("/v1/load_lora_adapter", json={"lora_name": "poet"})).status_code == 400
        await load(c, poet)
        assert error_of(await load(c, poet, "other", base_model_name="poet"))[2] == "base_model_name"
        assert not [s for worker in c.decode for s in worker.submits[1:]]


async def test_an_adapter_that_a_worker_refuses_is_not_served(poet: Path) -> None:
    async with cluster(num_decode=2) as c:
        script = c.decode[1].script
        script.refuse, script.refuse_param = pb.FAILURE_CODE_INVALID_ARGUMENT, "model"
        assert error_of(await load(c, poet)) == (400, "refused by script", "lora_path")
        script.refuse, script.refuse_param = pb.FAILURE_CODE_INTERNAL, ""
        assert error_of(await load(c, poet))[0] == 500
        assert [model.id async for model in c.openai.models.list()] == ["dry-run"]
        script.refuse = pb.FAILURE_CODE_UNAVAILABLE  # a worker that leaves reads it when it is back
        assert (await load(c, poet)).status_code == 200


async def test_who_may(poet: Path) -> None:
    async with cluster() as c:
        body = {"lora_name": "poet", "lora_path": str(poet)}
        for path in ("/v1/load_lora_adapter", "/v1/unload_lora_adapter"):
            refused = await c.http.post(path, json=body, headers={"Origin": "http://page"})
            assert refused.status_code == 401
            assert "needs an API key on the router" in refused.json()["error"]["message"]
    async with cluster(api_key="sesame") as c:
        assert (await load(c, poet)).status_code == 401
        good = {"authorization": "Bearer sesame"}
        answer = await c.http.post("/v1/load_lora_adapter", json=body, headers=good)
        assert answer.status_code == 200


async def test_adapters_of_the_start_belong_to_their_model(poet: Path) -> None:
    module = '{"name": "bard", "path": "%s", "base_model_name": "smol"}' % poet  # noqa: UP031 - braces
    async with both(lora_modules=f"poet={poet} {module}") as c:
        parents = {model.name: model.parent for model in c.gateway.models if model.adapter}
        assert parents == {"poet": "dry-run", "bard": "smol"}
        assert (await c.complete("x", model="bard")).status_code == 200
        for modules, message in (
            (f"dry-run={poet}", "'dry-run' is the name of a model"),
            (f"other={poet.parent}", "has no adapter_config.json"),
            ('{"name": "other", "path": "/x", "base_model_name": "nobody"}', "no model 'nobody'"),
        ):
            with pytest.raises(ConfigError, match=message):
                LoraAdapters(c.gateway).serve(parse_lora_modules(modules))
