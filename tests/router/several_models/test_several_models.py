"""Several models behind one router: each has its own workers, limits, caches, queue and metrics."""

from __future__ import annotations

import asyncio
from contextlib import AbstractAsyncContextManager
from typing import Any

import pytest

from common.errors import ConfigError
from common.model_files import resolve_model
from common.token_ids import unpack_ids
from router.config import RouterConfig
from router.gateway import Gateway
from router.served_model import LoadedModel, serve_models
from router.several_models.worker_table import named_models
from tests.common.default_model import default_tokenizer
from tests.harness.router import DRY_RUN, Cluster, cluster, text_of
from tests.harness.scripted_worker import Script, ScriptedWorker

SMOL_FILES = resolve_model("")
LONG = "a shared beginning that is long enough for several blocks " * 2


def smol_worker(
    role: str = "decode", name: str = "smol-0", script: Script | None = None, **info: Any
) -> ScriptedWorker:
    smol = default_tokenizer()
    facts = {
        "model": SMOL_FILES.name, "model_fingerprint": "5" * 64, "tokenizer_hash": smol.tokenizer_hash(),
        "vocab_size": smol.vocab_size, "max_model_len": 64, "kv_layout": "another", **info,
    }  # fmt: skip
    return ScriptedWorker(role, name, script, **facts)


def both(*others: ScriptedWorker, **options: Any) -> AbstractAsyncContextManager[Cluster]:
    """Start one decode worker of dry-run, d0, and one of smol unless others are given."""
    models = [LoadedModel("", "dry-run", DRY_RUN), LoadedModel("smol", SMOL_FILES.name, default_tokenizer())]
    return cluster(models=models, others=others or (smol_worker(),), **options)


async def test_the_model_field_chooses_workers_and_tokenizer() -> None:
    async with both() as c:
        byte, smol = c.decode
        for name in ("dry-run", "default", "mini-infer"):
            answer = (await c.complete("hello world", model=name)).json()
            assert answer["model"] == name
        await c.complete("hello world")
        assert [bytes(unpack_ids(submit.prompt_token_ids)) for submit in byte.submits] == [b"hello world"] * 4
        assert not smol.submits
        for name in ("smol", SMOL_FILES.name):
            answer = (await c.complete("hello world", model=name)).json()
            assert answer["choices"][0]["text"] != ""
        tokens = default_tokenizer().encode("hello world")
        assert [unpack_ids(submit.prompt_token_ids) for submit in smol.submits] == [tokens] * 2
        assert len(byte.submits) == 4
        await c.until(c.is_quiet)


@pytest.mark.wing("router.tokenize")
async def test_tokens_are_those_of_the_model() -> None:
    async with both() as c:
        tokens = (await c.http.post("/tokenize", json={"prompt": "hello world", "model": "smol"})).json()
        assert tokens == {"count": 2, "max_model_len": 64, "tokens": default_tokenizer().encode("hello world")}
        text = await c.http.post("/detokenize", json={"tokens": tokens["tokens"], "model": "smol"})
        assert text.json() == {"prompt": "hello world"}


async def test_models_are_listed_and_unknown_ones_are_not_found() -> None:
    async with both() as c:
        models = {model.id: model.model_dump() async for model in c.openai.models.list()}
        assert {name: card["max_model_len"] for name, card in models.items()} == {"dry-run": 512, "smol": 64}
        assert (await c.openai.models.retrieve("smol")).id == "smol"
        for name in ("gpt-4", "smol:poet", ""):
            refused = await c.chat(model=name)
            assert (refused.status_code, refused.json()["error"]["code"]) == (404, "model_not_found")
        assert "'dry-run', 'smol'" in refused.json()["error"]["message"]


async def test_limits_are_the_models_own() -> None:
    async with both() as c:
        prompt = [1] * 100
        assert (await c.complete(prompt, model="dry-run")).status_code == 200
        refused = (await c.complete(prompt, model="smol")).json()["error"]
        assert (refused["code"], "64 tokens" in refused["message"]) == ("context_length_exceeded", True)
        assert (await c.complete([40_000], model="smol")).status_code == 200
        assert (await c.complete([40_000], model="dry-run")).status_code == 400  # outside its vocabulary


async def test_prefix_indexes_are_the_models_own() -> None:
    smol = [smol_worker(name=f"smol-{i}", max_model_len=512) for i in range(3)]
    async with both(*smol) as c:
        byte_model, smol_model = c.gateway.models
        await c.complete(LONG, model="smol")
        await c.until(lambda: smol_model.workers.index.num_keys > 0)
        assert byte_model.workers.index.num_keys == 0
        for _ in range(4):
            await c.complete(LONG, model="smol")
        assert sorted(len(worker.submits) for worker in smol) == [0, 0, 5]
        await c.complete(LONG, model="dry-run")
        await c.until(lambda: byte_model.workers.index.num_keys == len(c.decode[0].keys) > 0)


async def test_a_worker_that_dies_takes_only_its_model_away() -> None:
    async with cluster() as c:
        control = text_of(await c.events(max_tokens=100))
    async with both(script=Script(delay_seconds=0.005), worker_wait_seconds=0) as c:
        byte, smol = c.decode
        stream = asyncio.create_task(c.events(max_tokens=100, model="dry-run"))
        await c.until(lambda: byte.num_tokens > 5)
        await smol.kill()
        await c.until(lambda: not c.gateway.models[1].workers.usable("decode"))
        assert (await c.chat(model="smol")).status_code == 503
        assert (await c.http.get("/readyz")).status_code == 200
        assert text_of(await stream) == control
        assert len(byte.submits) == 1
        assert (await c.chat(model="dry-run")).status_code == 200
        await smol.start()
        await c.until(lambda: bool(c.gateway.models[1].workers.usable("decode")))
        assert (await c.chat(model="smol", messages=[{"role": "user", "content": "x"}])).status_code == 200
        for worker in (byte, smol):
            await worker.kill()
        await c.until(lambda: not any(link.is_usable for link in c.gateway.workers.links))
        assert (await c.http.get("/readyz")).status_code == 503


async def test_a_full_queue_is_full_for_its_model_only() -> None:
    async with both(smol_worker(script=Script(is_silent=True)), max_queue=1) as c:
        waiting = asyncio.create_task(c.complete(model="smol"))
        await c.until(lambda: c.gateway.models[1].dispatcher.num_waiting == 1)
        assert (await c.complete(model="smol")).status_code == 429
        assert (await c.complete(model="dry-run")).status_code == 200
        text = (await c.http.get("/metrics")).text
        assert f'mini_infer_requests_refused_total{{model_name="{SMOL_FILES.name}",status="429"}} 1.0' in text
        assert f'mini_infer_open_choices{{model_name="{SMOL_FILES.name}",state="waiting"}} 1.0' in text
        assert 'mini_infer_open_choices{model_name="dry-run",state="waiting"} 0.0' in text
        waiting.cancel()
        await c.until(lambda: not c.gateway.models[1].dispatcher.num_waiting)


@pytest.mark.wing("router.explain")
@pytest.mark.wing("router.cluster_state")
async def test_operators_see_each_model() -> None:
    async with both(smol_worker(), smol_worker("prefill", "smol-p"), local_prefill_tokens=0) as c:
        answer = (await c.complete(model="smol", max_tokens=4)).json()
        await c.complete(model="dry-run", max_tokens=3)
        shown = (await c.http.get(f"/explain/{answer['id']}")).json()
        assert shown["model"] == "smol"
        candidates = shown["choices"][0]["decisions"][0]["candidates"]
        assert [(item["prefill"], item["decode"]) for item in candidates] == [("smol-p", "smol-0")]
        state = (await c.http.get("/v1/cluster")).json()
        assert {each["attention_backend"] for each in state["workers"]} == {"mirror"}
        assert {worker["id"]: worker["model"] for worker in state["workers"]} == {
            "d0": "dry-run", "smol-0": "smol", "smol-p": "smol",
        }  # fmt: skip
        idle = {"running": 0, "waiting": 0}
        assert state["models"] == {"dry-run": idle, "smol": idle}
        assert state["memory"].pop("private_bytes") > 10_000_000
        assert 0 <= state["memory"].pop("grammars") <= 256
        assert state["memory"] == {"index_blocks": 0, "journals": 0, "explain_entries": 2, "body_bytes": 0}
        assert all(worker["memory"]["kv_pool_bytes"] == 64 * 1024 for worker in state["workers"])
        text = (await c.http.get("/metrics")).text
        for line in (
            'vllm:generation_tokens_total{model_name="dry-run"} 3.0',
            f'vllm:generation_tokens_total{{model_name="{SMOL_FILES.name}"}} 4.0',
            'vllm:inter_token_latency_seconds_count{model_name="dry-run"} 2.0',
            f'vllm:inter_token_latency_seconds_count{{model_name="{SMOL_FILES.name}"}} 3.0',
            'mini_infer_workers{model_name="dry-run",role="prefill",state="ready"} 0.0',
            f'mini_infer_workers{{model_name="{SMOL_FILES.name}",role="prefill",state="ready"}} 1.0',
            f'mini_infer_requests_refused_total{{model_name="{SMOL_FILES.name}",status="429"}} 0.0',
        ):
            assert line in text, line
        families = [line for line in text.splitlines() if line.startswith("# TYPE")]
        assert len(set(families)) == len(families)


async def refusal(c: Cluster, worker: ScriptedWorker) -> str:
    """Return the router's reason for refusing the worker."""
    await worker.start()
    try:
        c.gateway.workers._add("decode", worker.address)
        link = c.gateway.workers.links[-1]
        await c.until(lambda: link.refused or link.info)
        return link.refused
    finally:
        await worker.kill()


async def test_workers_are_compared_within_their_model() -> None:
    async with both() as c:
        assert await refusal(c, smol_worker(name="new")) == ""
        assert "model_fingerprint differs" in await refusal(c, smol_worker(name="odd", model_fingerprint="f" * 64))
        assert "another tokenizer" in await refusal(
            c, smol_worker(name="odd", tokenizer_hash=DRY_RUN.tokenizer_hash())
        )
        assert "both call themselves smol-0" in await refusal(c, ScriptedWorker("decode", "smol-0"))
        assert await refusal(c, smol_worker(name="odd", model="llama")) == (
            f"odd serves 'llama', which is none of this router's models (dry-run, {SMOL_FILES.name}): name it in "
            "--models, or start the worker with one of these"
        )


async def test_a_worker_that_comes_back_with_another_model_joins_it() -> None:
    async with both(worker_wait_seconds=0) as c:
        first, second = c.gateway.models
        c.decode[0].worker_id = "changed"
        await c.decode[0].kill()
        await c.until(lambda: not first.workers.usable("decode"))
        changed = smol_worker(name="changed")
        changed.port = c.decode[0].port
        c.decode[0] = await changed.start()
        await c.until(lambda: len(second.workers.usable("decode")) == 2)
        assert not first.workers.links
        assert (await c.complete(model="dry-run")).status_code == 503
        assert (await c.complete(model="smol")).status_code == 200


@pytest.mark.parametrize(
    "loaded",
    [
        [LoadedModel("", "a", DRY_RUN), LoadedModel("", "a", DRY_RUN)],
        [LoadedModel("x", "a", DRY_RUN), LoadedModel("y", "a", DRY_RUN)],  # workers would announce the same
        [LoadedModel("b", "a", DRY_RUN), LoadedModel("", "b", DRY_RUN)],
    ],
)
def test_two_models_of_one_name_are_refused(loaded: list[LoadedModel]) -> None:
    config = RouterConfig(decode="a:1")
    with pytest.raises(ConfigError, match=r"two models are called '[ab]'"):
        Gateway(config, serve_models(config, loaded))


def test_models_have_names_of_their_own_or_given_ones() -> None:
    assert named_models(RouterConfig(decode="a:1", model="m", served_model_name="n")) == []
    config = RouterConfig(decode="a:1", models="/models/a=b.gguf, small=org/model,dry-run")  # type: ignore[call-arg]
    assert named_models(config) == [("/models/a", "b.gguf"), ("small", "org/model"), ("", "dry-run")]


@pytest.mark.parametrize(
    "fields",
    [
        {"models": "a,b", "model": "a"},
        {"models": "a,b", "served_model_name": "a"},
        {"models": "a,,b"},
        {"models": "a=,b"},
    ],
)
def test_settings_that_cannot_work(fields: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="--models"):
        RouterConfig(decode="a:1", **fields)
