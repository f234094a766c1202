"""Memory of weights, computed from a model's files; the number of GPUs, and `serve`'s explanation of it."""

from __future__ import annotations

import json

import pytest

from cli.cluster.flags import parse_config
from cli.gpus.workers import placement_lines
from cli.sizing import ranks
from cli.sizing.model_size import weight_bytes
from engine.config import EngineConfig

GB = 10**9


def test_weights_are_estimated_from_files(tmp_path):
    assert 200 * 10**6 < weight_bytes(EngineConfig()) < 300 * 10**6  # SmolLM2-135M in 16 bits
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "a.safetensors").write_bytes(bytes(1000))
    (tmp_path / "consolidated.safetensors").write_bytes(bytes(1000))  # the same once more
    assert weight_bytes(EngineConfig(str(tmp_path))) == 1000
    assert weight_bytes(EngineConfig(str(tmp_path), quant_mode="fp8")) == 500
    assert weight_bytes(EngineConfig("dry-run")) == 0
    gptq = {"quantization_config": {"quant_method": "gptq", "bits": 4, "group_size": 128}}
    (tmp_path / "config.json").write_text(json.dumps(gptq))
    assert weight_bytes(EngineConfig(str(tmp_path))) == 1000
    assert weight_bytes(EngineConfig(str(tmp_path), quant_mode="none")) == 4000
    assert weight_bytes(EngineConfig(str(tmp_path), dtype="float16")) == 4000
    assert weight_bytes(EngineConfig(str(tmp_path), quant_mode="int8-weight")) == 2000


@pytest.mark.parametrize(
    ("num_gpus", "memory", "weights", "tp"),
    [
        (1, 141 * GB, 15 * GB, 1),
        (8, 141 * GB, 15 * GB, 1),
        (8, 141 * GB, 141 * GB, 2),
        (2, 141 * GB, 700 * GB, 2),
        (8, 141 * GB, 0, 1),
        (8, 0, 700 * GB, 1),
    ],
)
def test_as_few_gpus_as_hold_the_weights(num_gpus: int, memory: int, weights: int, tp: int) -> None:
    assert ranks.fitting_tp(num_gpus, memory, weights) == tp


@pytest.mark.parametrize(("flags", "tp"), [([], 2), (["--tp=1"], 1), (["--tp=4"], 4)])
def test_serve_takes_it_unless_tp_is_given(flags: list[str], tp: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ranks, "weight_bytes", lambda engine: 100 * GB)
    monkeypatch.setattr(ranks, "smallest_memory", lambda: 100 * GB)
    config = parse_config(flags, {}, lambda device: ["0", "1", "2", "3"])
    assert (config.engine.tp, config.serve.decode) == (tp, 4 // tp)
    why = "--tp 2: weights of 100 GB and KV do not fit a GPU of 100 GB; workers do both"
    assert placement_lines(config)[-1].startswith(why) == (not flags)
