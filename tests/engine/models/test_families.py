"""The whole engine on tiny models of each family: batches, chunks, caches and both preemptions equal transformers."""

from __future__ import annotations

from pathlib import Path

import pytest

from engine.assembly import assemble
from engine.config import EngineConfig
from tests.engine.conftest import Greedy
from tests.engine.driving import serve
from tests.engine.tiny_models import TINY_MODELS, VOCAB_SIZE, with_wing

pytestmark = pytest.mark.slow

NUM_TOKENS = 12
PROMPTS = [[(7 * i + 11 * j) % (VOCAB_SIZE - 8) + 8 for j in range(3 + 5 * i)] for i in range(10)]
SETTINGS = [
    {},
    {"max_num_batched_tokens": 8, "max_num_seqs": 4},
    {"num_gpu_blocks": 28, "block_size": 4, "preemption": "recompute"},
    pytest.param(
        {"num_gpu_blocks": 28, "block_size": 4, "preemption": "swap", "host_tier_gb": 0.01},
        marks=pytest.mark.wing("kvstore.tier"),
    ),
]


@pytest.fixture(scope="module", params=map(with_wing, ["llama", "qwen2", "qwen3", "qwen3-moe", "mixtral"]))
def family(request: pytest.FixtureRequest, greedy: Greedy) -> tuple[Path, list[list[int]]]:
    return greedy(TINY_MODELS[request.param], PROMPTS, NUM_TOKENS)


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
@pytest.mark.parametrize("batch", [1, 10])
def test_greedy_equals_transformers(
    family: tuple[Path, list[list[int]]], settings: dict[str, object], batch: int
) -> None:
    path, expected = family
    base = {"model": str(path), "device": "cpu", "dtype": "float32", "num_gpu_blocks": 256, "num_threads": 1}
    engine = assemble(EngineConfig(**{**base, **settings})).engine  # type: ignore[arg-type]
    for _ in range(2):  # the second time from the prefix cache
        requests = serve(engine, PROMPTS[-batch:], NUM_TOKENS)
        assert [request.output_token_ids for request in requests] == expected[-batch:]
    if "preemption" not in settings:
        assert requests[-1].num_cached_tokens > 0
    elif batch == 10:
        assert engine.load().num_preemptions > 0
