"""Models that run by transformers' code, through real services: KV is handed over and cached, tokens are streamed."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from common.model_files import resolve_model
from common.text.load import load_tokenizer
from tests.engine.transformers_models.hf_families import FAMILIES, HfFamily, generated
from tests.harness.cluster import Cluster, running_cluster, save_with_tokenizer

NUM_TOKENS = 20
PROMPTS = ["Hello", "The quick brown fox jumps over the lazy dog. " * 3, "x" * 70]


class Running:
    """A model behind services, and transformers' own of it."""

    def __init__(self, cluster: Cluster, family: HfFamily, path: Path) -> None:
        self.cluster, self.name = cluster, path.name
        self._reference, self._tokenizer = family.build(), load_tokenizer(resolve_model(str(path)))

    def expected(self, prompt: str) -> str:
        ids = self._tokenizer.encode(prompt, add_special_tokens=True)
        return self._tokenizer.decode(generated(self._reference, ids, NUM_TOKENS))


@pytest.fixture(scope="module", params=["gemma2"])
def running(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    tiny = FAMILIES[request.param]
    family = replace(tiny, changes={**tiny.changes, "vocab_size": 320, "max_position_embeddings": 512})
    path = save_with_tokenizer(family, tmp_path_factory.mktemp("models") / request.param)
    flags = ("--model-impl=transformers", "--dtype=float32", "--num-gpu-blocks=256", "--num-threads=1")
    with running_cluster(engine_args=(f"--model={path}", "--device=cpu", *flags)) as cluster:
        yield Running(cluster, family, path)


@pytest.mark.wing("router.explain")
def test_tokens_equal_generate_after_the_hand_off(running: Running) -> None:
    expected = [running.expected(prompt) for prompt in PROMPTS]
    assert running.cluster.complete_all(PROMPTS, NUM_TOKENS, model=running.name) == expected
    assert (
        running.cluster.complete_all(PROMPTS, NUM_TOKENS, model=running.name) == expected
    )  # now from the prefix caches
    prompt = "another prompt, which no cache holds, of several blocks of keys and values. " * 2
    answer = running.cluster.ask(prompt, NUM_TOKENS, model=running.name)
    legs = running.cluster.legs_of(answer.id)
    assert [leg["worker"] for leg in legs] == ["prefill-0", "decode-0"]
    assert legs[1]["transport"] == "shm"
    assert answer.choices[0].text == running.expected(prompt)
