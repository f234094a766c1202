"""Adapters with tensor parallelism and pipeline stages: tokens are those of merged models."""

from __future__ import annotations

import gc
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from common.lora.adapter_ref import AdapterRef
from engine.loader.random_weights import DRY_RUN_CONFIG
from engine.lora.adapters import CpuAdapters, open_adapters
from engine.lora.cpu_runner import LoraCpuRunner
from mini_infer import LLM
from tests.engine import threaded_ranks
from tests.engine.lora.test_lora_engine import FUSED, GREEDY_8, PROMPTS, merged_answers, run, shapes_of
from tests.engine.lora.test_lora_features import write_for
from tests.engine.threaded_ranks import open_stages, threaded_runner
from tests.engine.tiny_models import TINY_MODELS
from tests.harness.adapters import ALL_LINEAR, write_adapter

pytestmark = [pytest.mark.slow, pytest.mark.wing("engine.lora"), pytest.mark.wing("engine.tensor_parallel")]


@pytest.mark.parametrize(
    ("name", "num_ranks", "num_stages", "targets"),
    [
        ("llama", 2, 1, (*ALL_LINEAR, "embed_tokens", "lm_head")),
        ("llama", 1, 2, (*ALL_LINEAR, "embed_tokens", "lm_head")),
        ("llama-biases", 2, 1, ALL_LINEAR),
        ("qwen3", 2, 2, ALL_LINEAR),
        ("phi3-short", 2, 1, FUSED),
        pytest.param("gemma3", 2, 1, ALL_LINEAR, marks=pytest.mark.wing("engine.windows")),
        pytest.param("gemma3", 1, 3, ALL_LINEAR, marks=pytest.mark.wing("engine.windows")),
        ("qwen3", 6, 1, ALL_LINEAR[:4]),  # three ranks have the same KV head
    ],
)
def test_ranks_equal_merged_models(
    name: str, num_ranks: int, num_stages: int, targets: tuple[str, ...], tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    tiny = TINY_MODELS[name]
    if num_ranks == 6:
        tiny = replace(tiny, changes={**tiny.changes, "intermediate_size": 84})
    folder = write_adapter(tmp_path / "adapter", shapes_of(tiny.build()), targets, seed=1)
    asked = [*zip(PROMPTS, (folder, None, folder, None), strict=True)]

    def in_threads(_: CpuAdapters, loaded: Any, _pool: Any, host: Any, config: Any, **_named: Any) -> Any:
        return threaded_runner(loaded, host, config, num_ranks, num_stages)

    monkeypatch.setattr(CpuAdapters, "runner", in_threads)
    runners = []

    def own_runner(*args: Any) -> LoraCpuRunner:
        adapters = open_adapters(args[0], args[3])
        assert isinstance(adapters, CpuAdapters)
        runners.append(LoraCpuRunner(adapters, *args))
        return runners[-1]

    monkeypatch.setattr(threaded_ranks, "CpuRunner", own_runner)
    parts = open_stages(
        tiny.save(tmp_path / "model"), num_stages, monkeypatch, num_ranks, enable_lora=True, max_num_batched_tokens=24
    )
    assert len(runners) == num_ranks * num_stages
    assert run(parts.engine, asked, GREEDY_8) == merged_answers(tiny, asked)


@pytest.mark.usefixtures("forked_followers")
def test_processes_read_adapters_that_plans_name(tmp_path: Path) -> None:
    name = write_for(tmp_path / "adapter", DRY_RUN_CONFIG)
    settings: dict[str, Any] = {"num_gpu_blocks": 128, "enable_lora": True, "num_threads": 1}
    found = []
    for ranks in ({}, {"tp": 2}, {"pp": 2}):
        llm = LLM("dry-run", **ranks, **settings)
        asked = [(prompt, folder) for prompt in PROMPTS for folder in (AdapterRef.parse(name).folder, None)]
        found.append(run(llm.engine, asked, GREEDY_8))
        del llm
        gc.collect()
    assert found[0] == found[1] == found[2]
    assert found[0][0] != found[0][1]
