"""The engine benchmark runs from its command line and prints the fields that others read."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from benchmarks import engine as benchmark
from benchmarks import speculation
from benchmarks.profile.floors import Peaks, decode_floor_seconds, num_weights, prefill_floor_seconds, weight_bytes
from benchmarks.reports import gpu_table
from engine.loader.random_weights import DRY_RUN_CONFIG

CONFIGS = Path(__file__).parents[2] / "benchmarks/configs"
ARGS = ["--model", "dry-run", "--batch", "1,3", "--input", "20", "--output", "5", "--prefill", "40", "--json"]


def test_json_lines_carry_the_promised_fields(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(benchmark, "measure_peaks", lambda device, dtype: Peaks(1e10, 1e11))
    assert benchmark.main([*ARGS, "--num-threads", "1"]) == 0
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [line.get("batch") for line in lines] == [1, 3, None]
    for line in lines[:2]:
        assert {"model", "tpot_ms", "tok_s", "prefill_s", "floor_tok_s", "fraction_of_floor"} <= line.keys()
        assert line["tok_s"] > 0
    assert lines[2]["prefill"] == 40


def test_the_pool_holds_a_batch_of_a_model_with_kv_groups(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(benchmark, "measure_peaks", lambda device, dtype: Peaks(1e10, 1e11))
    raw = json.loads((CONFIGS / "gemma3-4b/config.json").read_text())
    small = {"num_hidden_layers": 6, "hidden_size": 32, "intermediate_size": 32, "head_dim": 16, "vocab_size": 99}
    (tmp_path / "config.json").write_text(json.dumps({**raw, **small, "max_position_embeddings": 64}))
    args = ["--model", str(tmp_path), "--load-format", "dummy", "--device", "cpu", "--quant-mode", "none"]
    loads = ["--batch", "3", "--input", "30", "--output", "9", "--num-threads", "1", "--json"]
    assert benchmark.main([*args, *loads]) == 0
    [line] = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert line["rows_per_step"] == 3


def test_a_model_that_does_not_exist_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        benchmark.main(["--model", "/nowhere/at/all"])
    assert ended.value.code == 2
    assert capsys.readouterr().err.startswith("error: model")


def test_floors_count_what_a_step_reads() -> None:
    weights = 2 * (64 * (2 * 64 + 2 * 32) + 3 * 64 * 128) + 320 * 64
    assert num_weights(DRY_RUN_CONFIG) == weights
    peaks = Peaks(1e9, 1e9)
    kv_bytes = 2 * 2 * 32 * 4
    found = decode_floor_seconds(DRY_RUN_CONFIG, "float32", "none", 3, 10, peaks)
    assert found == pytest.approx((weights * 4 + 3 * 10 * kv_bytes) / 1e9)
    products = 2 * (weights - 320 * 64) * 10
    assert prefill_floor_seconds(DRY_RUN_CONFIG, 10, peaks) == pytest.approx((products + 4 * 2 * 64 * 55) / 1e9)
    windowed = replace(DRY_RUN_CONFIG, sliding_window=4, full_layers=(1,))
    found = decode_floor_seconds(windowed, "float32", "none", 3, 10, peaks)
    assert found == pytest.approx((weights * 4 + 3 * (10 + 4) * kv_bytes / 2) / 1e9)
    assert prefill_floor_seconds(windowed, 10, peaks) == pytest.approx((products + 4 * 64 * (55 + 34)) / 1e9)


@pytest.mark.parametrize(
    ("label", "inner", "head"),
    [
        ("none", 2, 2), ("w8a8", 1, 1), ("int4-weight", 0.625, 1), ("gptq-4bit", 0.53125, 2), ("fp8-blocks", 1, 2),
        ("compressed-tensors-w4a16", 0.53125, 2), ("compressed-tensors-w4a16+w8a16", 0.53125, 2),
    ],
)  # fmt: skip
def test_floors_know_what_checkpoints_hold(label: str, inner: float, head: float) -> None:
    head_weights = 320 * 64
    expected = (num_weights(DRY_RUN_CONFIG) - head_weights) * inner + head_weights * head
    assert weight_bytes(DRY_RUN_CONFIG, "bfloat16", label) == expected


def test_a_table_shows_what_was_measured_and_what_was_not() -> None:
    figures: list[dict[str, Any]] = [
        {"batch": 8, "tok_s": 1912.4, "full_batch_tok_s": 1920.0, "fraction_of_floor": 0.806},
        {"batch": 256, "tok_s": 22325.0, "full_batch_tok_s": 23715.2, "fraction_of_floor": 0.61},
        {"prefill": 8192, "prefill_s": 0.1914, "tok_s": 42000.0},
        {"offline": 256, "tok_s": 13201.9},
    ]
    row = gpu_table.table_row("qwen2.5-7b:fp8", figures)
    assert row == (
        "| qwen2.5-7b:fp8 | - | 1,912 | - | 22,325 | 23,715 | - / 191.4 / - | 13,202 | - / 81% / - / 61% |"
    )
    assert row.count("|") == gpu_table.header().splitlines()[0].count("|")
    assert gpu_table.table_row("x", []).count("-") == 13


def test_drafters_of_a_known_accuracy_are_compared(capsys: pytest.CaptureFixture[str]) -> None:
    args = (
        "--load-format dummy --quant-mode none --dtype float32 --num-threads 1 --accuracy 0.7 --drafts 3 --rounds 1"
    )
    model = ["--model", str(CONFIGS / "one-layer"), "--input", "16", "--output", "12"]
    assert speculation.main([*model, *args.split(), "--json"]) == 0
    plain, drafted = (json.loads(line) for line in capsys.readouterr().out.splitlines())
    assert plain["tokens_per_step"] <= 1.1
    assert drafted["tokens_per_step"] > 1.1
    assert drafted["equal_answers"] == "1/1"
