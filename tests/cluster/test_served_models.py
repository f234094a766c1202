"""Two models behind one router, as real processes: each answers as one engine with that model does."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from mini_infer import LLM, SamplingParams
from tests.engine.tiny_models import GEMMA3, TinyModel
from tests.harness.cluster import Cluster, running_cluster, save_with_tokenizer

PROMPT = "The quick brown fox jumps over the lazy dog. " * 4
SETTINGS = {"num_gpu_blocks": 512, "num_threads": 1}


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("models") / "tiny")


def save_tiny_model(folder: Path) -> Path:
    """Write a random Gemma-3 with the bytes of dry-run as tokens and another end of sequence."""
    return save_with_tokenizer(TinyModel("Gemma3", {**GEMMA3, "vocab_size": 320}), folder)


@pytest.fixture(scope="module")
def cluster(tiny: Path) -> Iterator[Cluster]:
    models = {"prefill-1": str(tiny), "decode-1": str(tiny)}
    # Its KV groups travel by TCP, that of all tokens while the rest of a prompt is computed.
    other = ("--kv-transport=tcp", "--max-num-batched-tokens=64")
    with running_cluster(2, 2, models=models, role_args=dict.fromkeys(models, other)) as running:
        yield running


def test_each_model_answers_as_one_engine_with_it(cluster: Cluster, tiny: Path) -> None:
    params = SamplingParams(max_tokens=16, temperature=0.0, ignore_eos=True)
    expected = {
        name: LLM(model, **SETTINGS).generate([PROMPT], params)[0].text  # type: ignore[arg-type]
        for name, model in (("dry-run", "dry-run"), ("tiny", str(tiny)))
    }
    assert expected["dry-run"] != expected["tiny"]
    for _ in range(2):  # the second time from the prefix caches
        assert {name: cluster.complete(PROMPT, model=name) for name in expected} == expected
    assert {worker["id"]: worker["model"] for worker in cluster.wait_quiet()} == {
        "prefill-0": "dry-run", "decode-0": "dry-run", "prefill-1": "tiny", "decode-1": "tiny",
    }  # fmt: skip


def test_kv_groups_travel_while_the_prompt_is_computed(cluster: Cluster) -> None:
    """KV that all later queries read is pulled before the end, the rest after it; nothing is computed twice."""
    found = cluster.legs_of(cluster.ask("one more, " + PROMPT, 4, model="tiny").id)[-1]
    assert (found["transport"], found["kv_pull_failed"]) == ("tcp", False)
    assert found["prefetched_tokens"] == 128
    cluster.wait_quiet()
