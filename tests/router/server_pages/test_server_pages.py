"""GET /ping, /version, /load, /server_info and /tokenizer_info."""

from __future__ import annotations

import asyncio

from common import VERSION
from tests.harness.router import DRY_RUN, cluster
from tests.harness.scripted_worker import Script
from tests.router.several_models.test_several_models import both

KEY = {"authorization": "Bearer a-key"}


async def test_healthz_says_what_is_served_by_how_many_workers() -> None:
    async with cluster(num_prefill=1, api_key="a-key") as c:
        health = (await c.http.get("/healthz")).json()
        assert health == {
            "status": "ok", "model": "dry-run", "roles": {"prefill": 1, "decode": 1}, "quantization": "none",
            "cuda_graphs": False, "use_cuda_graph": False, "quant_mode": "none", "dry": True,
            "models": {"dry-run": {"prefill": 1, "decode": 1}},
        }  # fmt: skip


async def test_healthz_counts_the_workers_of_each_model() -> None:
    async with both() as c:
        one = {"prefill": 0, "decode": 1}
        health = (await c.http.get("/healthz")).json()
        assert (health["model"], health["roles"], health["models"]) == ("dry-run", one, {"dry-run": one, "smol": one})
        await c.decode[1].kill()
        await c.until(lambda: not c.gateway.models[1].workers.usable("decode"))
        assert (await c.http.get("/healthz")).json()["models"]["smol"] == {"prefill": 0, "decode": 0}


async def test_ping_needs_no_key_and_follows_the_workers() -> None:
    async with cluster(api_key="a-key") as c:
        answer = await c.http.get("/ping")
        assert (answer.status_code, answer.content) == (200, b"")
        for path in ("/load", "/server_info", "/tokenizer_info"):
            assert (await c.http.get(path)).status_code == 401
        await c.decode[0].kill()
        await c.until(lambda: not c.model.workers.usable("decode"))
        assert (await c.http.get("/ping")).status_code == 503


async def test_load_counts_open_choices() -> None:
    async with cluster(script=Script(is_silent=True)) as c:
        assert (await c.http.get("/load")).json() == {"server_load": 0}
        asked = asyncio.create_task(c.chat())
        await c.until(lambda: c.model.dispatcher.open_choices)
        assert (await c.http.get("/load")).json() == {"server_load": 1}
        asked.cancel()
        await c.until(c.is_quiet)
        assert (await c.http.get("/load")).json() == {"server_load": 0}


async def test_server_info_has_settings_and_workers_and_no_secret() -> None:
    async with cluster(num_prefill=1, api_key="a-key", max_queue=7) as c:
        answer = await c.http.get("/server_info", headers=KEY)
        info = answer.json()
        assert (info["version"], info["config"]["max_queue"]) == (VERSION, 7)
        assert (await c.http.get("/version", headers=KEY)).json() == {"version": VERSION}
        assert sorted(worker["role"] for worker in info["models"]["dry-run"]) == ["decode", "prefill"]
        assert "a-key" not in answer.text
        assert not {"api_key", "cluster_token"} & set(info["config"])


async def test_tokenizer_info_is_the_models() -> None:
    async with cluster() as c:
        info = (await c.http.get("/tokenizer_info", params={"model": "dry-run"})).json()
        assert info["eos_token"] == DRY_RUN.token_text(DRY_RUN.eos_token_ids[0])
        assert info["vocab_size"] == DRY_RUN.vocab_size
        assert "messages" in info["chat_template"]
        assert info["added_tokens_decoder"][str(DRY_RUN.bos_id)]["content"] == info["bos_token"]
        assert info["model_max_length"] == c.model.limits().max_model_len
        other = await c.http.get("/tokenizer_info", params={"model": "other"})
        assert (other.status_code, other.json()["error"]["code"]) == (404, "model_not_found")
