"""Adapters through real processes: the bytes of one engine, handed over, also when loaded late."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import httpx
import openai
import pytest

from common.lora.adapter_ref import AdapterRef
from common.model_files import resolve_model
from common.text.load import load_tokenizer
from engine.assembly import assemble
from engine.loader.random_weights import DRY_RUN_CONFIG
from tests.engine.driving import GREEDY, engine_config
from tests.harness.adapters import shapes_of_config, write_adapter
from tests.harness.cluster import Cluster, running_cluster

pytestmark = pytest.mark.wing("engine.lora")
SHAPES = shapes_of_config(DRY_RUN_CONFIG)
PROMPT = "the answer of an adapter " * 6
NUM_TOKENS = 48
ENGINE = ("--model=dry-run", "--num-gpu-blocks=512", "--num-threads=1", "--enable-lora", "--max-loras=2")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("adapters")


@pytest.fixture(scope="module")
def shared(folder: Path) -> Iterator[Cluster]:
    for seed, name in enumerate(("poet", "painter", "sculptor")):
        write_adapter(folder / name, SHAPES, ("_proj", "lm_head"), seed=seed, std=0.3)
    modules = f"--lora-modules=poet={folder / 'poet'}"
    with running_cluster(1, 2, engine_args=(*ENGINE, modules), router_args=(modules,)) as running:
        yield running


@pytest.fixture(scope="module")
def expected(shared: Cluster, folder: Path) -> dict[str, str]:
    """Return greedy answers of one engine by adapter."""
    tokenizer = load_tokenizer(resolve_model("dry-run"))
    engine = assemble(engine_config("dry-run", num_gpu_blocks=512, num_threads=1, enable_lora=True)).engine
    found = {}
    for name in ("dry-run", "poet", "painter", "sculptor"):
        adapter = "" if name == "dry-run" else str(AdapterRef.of(folder / name))
        params = replace(GREEDY, max_tokens=NUM_TOKENS, ignore_eos=True)
        request = engine.add_request(tokenizer.encode(PROMPT), params, adapter=adapter)
        while engine.has_work():
            engine.step()
        found[name] = tokenizer.decode(request.output_token_ids)
    assert len(set(found.values())) == 4
    return found


def load(cluster: Cluster, name: str, path: Path, **fields: object) -> httpx.Response:
    body = {"lora_name": name, "lora_path": str(path), **fields}
    return httpx.post(f"{cluster.url}/v1/load_lora_adapter", json=body, timeout=60)


def unload(cluster: Cluster, name: str) -> httpx.Response:
    return httpx.post(f"{cluster.url}/v1/unload_lora_adapter", json={"lora_name": name}, timeout=60)


def test_adapters_of_the_start_are_models(cluster: Cluster, expected: dict[str, str]) -> None:
    cards = {card["id"]: card for card in cluster.get("/v1/models")["data"]}
    assert cards.keys() == {"dry-run", "poet"}
    assert cards["poet"]["parent"] == "dry-run"
    for _ in range(2):  # the second time from the prefix caches
        for name in ("poet", "dry-run"):
            answer = cluster.ask(PROMPT, NUM_TOKENS, model=name)
            assert answer.model == name
            assert answer.choices[0].text == expected[name]
    with pytest.raises(openai.NotFoundError):
        cluster.ask(PROMPT, model="painter")


def test_adapters_come_and_go_while_serving(cluster: Cluster, folder: Path, expected: dict[str, str]) -> None:
    """There are three adapters, and workers keep two."""
    for name in ("painter", "sculptor"):
        answer = load(cluster, name, folder / name)
        assert (answer.status_code, answer.text) == (200, f"Success: LoRA adapter '{name}' added successfully.")
    for _ in range(2):
        for name, text in expected.items():
            assert cluster.ask(PROMPT, NUM_TOKENS, model=name).choices[0].text == text
    again = load(cluster, "painter", folder / "painter")
    assert again.status_code == 400
    assert "already been loaded" in again.json()["error"]["message"]
    assert load(cluster, "painter", folder / "poet", load_inplace=True).status_code == 200
    assert cluster.ask(PROMPT, NUM_TOKENS, model="painter").choices[0].text == expected["poet"]
    for name in ("painter", "sculptor"):
        assert unload(cluster, name).text == f"Success: LoRA adapter '{name}' removed successfully."
        assert unload(cluster, name).status_code == 404
        with pytest.raises(openai.NotFoundError):
            cluster.ask(PROMPT, model=name)
    cluster.wait_quiet()


def test_placement_counts_the_read_of_an_adapter_that_a_worker_lacks(cluster: Cluster, folder: Path) -> None:
    """Other costs of a placement are measured on a machine that other tests share, and may be larger here."""
    write_adapter(folder / "singer", SHAPES, seed=9)
    assert load(cluster, "singer", folder / "singer").status_code == 200
    cluster.services["decode-0"].kill()  # it comes back without
    cluster.start_killed()
    answer = cluster.ask("one of other prompts", model="singer")
    [choice] = cluster.get(f"/explain/{answer.id}")["choices"]
    [decision] = choice["decisions"]
    costs = {each["decode"]: each["cost_seconds"] for each in decision["candidates"]}
    terms = {each["decode"]: each["terms_seconds"] for each in decision["candidates"]}
    assert {name: each["adapter"] for name, each in terms.items()} == {"decode-0": 0.05, "decode-1": 0.0}
    assert {name: sum(each.values()) for name, each in terms.items()} == pytest.approx(costs, abs=1e-4)
    assert choice["workers"][-1]["worker"] == decision["chosen"]["decode"]
    assert unload(cluster, "singer").status_code == 200
