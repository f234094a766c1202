"""Models whose layers look back a window: equal to transformers, and blocks that nobody reads any more go back."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from engine.assembly import EngineParts, assemble
from engine.config import EngineConfig
from engine.request import Request
from tests.engine.driving import GREEDY, random_prompt
from tests.engine.tiny_models import TINY_MODELS, VOCAB_SIZE, reference_greedy

pytestmark = pytest.mark.slow

NUM_TOKENS = 24
PROMPTS = [random_prompt(length, VOCAB_SIZE, length) for length in (1, 5, 20, 21, 22, 47, 60, 90)]
SCARCE = -1
SCARCE_BLOCKS = {"mistral-window": 14, "gemma3": 100, "gpt-oss": 42}  # hold the longest sequence, and not two of them
SETTINGS: list[dict[str, Any]] = [
    {},
    {"max_num_batched_tokens": 12, "max_num_seqs": 4},
    {"num_gpu_blocks": SCARCE, "preemption": "recompute"},
    {"num_gpu_blocks": SCARCE, "preemption": "swap", "host_tier_gb": 0.01},
    {"num_speculative_tokens": 3, "ngram_min": 1},
    {"prefix_cache": False, "max_num_batched_tokens": 16},
]


class Family:
    """A saved model, and transformers' greedy tokens for all prompts."""

    def __init__(self, name: str, path: Path) -> None:
        self.name, tiny = name, TINY_MODELS[name]
        self.path = tiny.save(path)
        model = tiny.build()
        self.expected = [reference_greedy(model, prompt, NUM_TOKENS) for prompt in PROMPTS]

    def engine(self, **settings: Any) -> EngineParts:
        """An engine with blocks of 4 tokens."""
        base = {"device": "cpu", "dtype": "float32", "num_threads": 1, "num_gpu_blocks": 1200, "block_size": 4}
        settings = {**base, **settings}
        if settings["num_gpu_blocks"] == SCARCE:
            settings |= {"num_gpu_blocks": SCARCE_BLOCKS[self.name], "max_num_batched_tokens": 16, "max_num_seqs": 8}
        return assemble(EngineConfig(str(self.path), **settings))


@pytest.fixture(scope="module", params=["mistral-window", "gemma3", "gpt-oss"])
def family(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Family:
    return Family(request.param, tmp_path_factory.mktemp(request.param) / "m")


def run(parts: EngineParts, prompts: list[list[int]]) -> list[Request]:
    engine = parts.engine
    params = replace(GREEDY, max_tokens=NUM_TOKENS, ignore_eos=True)
    requests = [engine.add_request(prompt, params) for prompt in prompts]
    while engine.has_work():
        engine.step()
    assert engine.num_failed_steps == 0
    engine.scheduler.kv.pool.check_integrity()
    assert engine.scheduler.kv.pool.num_used == 0
    return requests


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_greedy_equals_transformers(family: Family, settings: dict[str, Any]) -> None:
    parts = family.engine(**settings)
    for _ in range(2):  # the second time from the prefix cache
        requests = run(parts, PROMPTS)
        assert [request.output_token_ids for request in requests] == family.expected
    if "preemption" in settings:
        assert parts.engine.scheduler.num_preemptions > 0
    elif settings.get("prefix_cache", True):
        assert requests[-1].num_cached_tokens == 88
    if "num_speculative_tokens" in settings:
        assert parts.engine.scheduler.num_draft_tokens > parts.engine.scheduler.num_accepted_tokens
