"""Short prompt steps as graphs give the tokens of eager steps; interpreted, these steps are not captured."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.config import GpuConfig
from engine.engine import Engine
from engine.gpu.runner import GpuRunner
from engine.prompt_graphs import graphs as prompt_graphs
from engine.prompt_graphs import shapes
from engine.prompt_graphs.inputs import PromptInputs
from engine.request import SamplingParams
from kernels.gpu.prompt_graphs import split_tiles
from tests.gpu.test_engine import ON_GPU, PROMPTS, generate, greedy, open_gpu, reference


def open_with_graphs(
    model: Path, monkeypatch: pytest.MonkeyPatch, **settings: Any
) -> tuple[Engine, GpuRunner, list[tuple[int, int]]]:
    """Open an engine. Also returns its runner and the list of shapes of the graphs that have run."""
    monkeypatch.setattr(shapes, "PROMPT_BUCKETS", (4, 16, 64))
    monkeypatch.setattr(shapes, "FEW_ROWS", 3)
    monkeypatch.setattr(shapes, "MANY_ROWS_BUCKETS", (8, 64))
    made, runner = open_gpu(model, monkeypatch, GpuConfig(), **settings)
    graphs = runner.prompt_graphs = runner.open_prompt_graphs(captures=ON_GPU)
    run, buckets = graphs.run, []

    def counted(batch: Any, turn: int) -> Any:
        num_tokens = sum(row.num_tokens for row in batch.rows)
        buckets.append(next((t, r) for t, r in graphs.shapes if t >= num_tokens and r >= len(batch.rows)))
        return run(batch, turn)

    monkeypatch.setattr(graphs, "run", counted)
    return made, runner, buckets


@pytest.mark.parametrize("settings", [{}, {"max_num_batched_tokens": 10}], ids=["whole", "chunks"])
def test_tokens_equal_those_of_the_eager_way(
    settings: dict[str, Any], model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Single prompts, chunks without samples, next to decode rows whose last token is only on the device, cached."""
    expected = generate(reference(model), greedy(5))
    made, _, buckets = open_with_graphs(model, monkeypatch, block_size=8, **settings)
    for _ in range(2):
        assert generate(made, greedy(5)) == expected
    assert made.kv.stats.hit_tokens > 0
    assert set(buckets) == ({(8, 4), (64, 4)} if not settings else {(8, 4), (16, 3), (64, 4)})
    assert made.num_failed_steps == 0


def test_samples_logprobs_and_changed_logits(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    params = [
        SamplingParams(max_tokens=4, temperature=1.0, seed=1, ignore_eos=True),
        SamplingParams(max_tokens=4, temperature=0.8, seed=2, top_k=5, ignore_eos=True),
        SamplingParams(max_tokens=4, temperature=1.2, seed=4, top_p=0.8, ignore_eos=True, logprobs=1),
        SamplingParams(max_tokens=4, temperature=1.0, seed=5, presence_penalty=0.5, ignore_eos=True),
    ]
    want = generate(reference(model), params)
    made, _, buckets = open_with_graphs(model, monkeypatch)
    assert generate(made, params) == want
    assert buckets
    buckets.clear()
    generate(made, [replace(params[0], prompt_logprobs=1)], [[*PROMPTS[1], 9, 8]])
    assert buckets == []


def test_steps_beyond_the_bounds_go_the_eager_way(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prompt_graphs, "MAX_SPLIT_KEYS", 0)
    expected = generate(reference(model), greedy(3))
    made, _, buckets = open_with_graphs(model, monkeypatch)
    assert generate(made, greedy(3), PROMPTS[:1]) == expected[:1]
    long = max(PROMPTS, key=len)
    buckets.clear()
    assert generate(made, greedy(3), [long]) == [expected[PROMPTS.index(long)]]
    assert buckets == []


def test_contexts_are_split(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both for chunks and for decode rows in the same step."""
    for name in ("MIN_SPLIT", "UNIT"):
        monkeypatch.setattr(split_tiles, name, 64)
    monkeypatch.setattr(prompt_graphs, "num_spare_tiles", lambda *_: 20)
    merged: list[int] = []
    split = split_tiles.split_tiles

    def counted(*args: Any) -> Any:
        found, merges = split(*args)
        merged.append(len(merges))
        return found, merges

    monkeypatch.setattr(prompt_graphs, "split_tiles", counted)
    prompts = [[(7 * token + start) % 90 for token in range(170)] for start in range(2)]
    expected = generate(reference(model), greedy(6), prompts)
    made, _, _ = open_with_graphs(model, monkeypatch, max_num_batched_tokens=60, max_model_len=200)
    assert generate(made, greedy(6), prompts) == expected
    assert max(merged) > 1
    assert made.num_failed_steps == 0


def test_inputs_are_views_of_one_buffer() -> None:
    buffer = torch.arange(1000, dtype=torch.int32)
    inputs = PromptInputs.over(buffer, 16, 5, 7)
    assert PromptInputs.size(16, 5, 7) == 105
    assert (inputs.fields.shape, inputs.tiles.shape, inputs.samples.shape) == ((4, 16), (5, 4), (3, 7))
    assert inputs.tiles[0, 0] == 64
    assert inputs.samples[0, 0] == 84
    assert inputs.fields.data_ptr() == buffer.data_ptr()
