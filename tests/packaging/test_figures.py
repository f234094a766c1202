"""The figure page agrees with the JSON next to it."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest

from benchmarks.comparisons.ablations import measure
from benchmarks.reports.figures import CHARTS, DOCS, page

MACHINE = {"machine": "a machine"}
LINES: dict[str, list[dict[str, Any]]] = {
    "throughput": [
        {"model": "m", "step": "batching", "batch": 8, "tok_s": 1234.5, "fraction_of_floor": 0.5,
         "tok_s_min": 1200.0, "tok_s_max": 1300.0, "rounds": 3}
    ],
    "throughput_cpu": [{"model": "m", "step": "batching", "batch": 8, "tok_s": 234.5, "fraction_of_floor": 0.5}],
    "cuda_graphs": [
        {"model": "m", "step": step, "batch": batch, "tpot_ms": 4.5, "tok_s": 1000.0, "fraction_of_floor": 0.5}
        for step in ("eager", "CUDA graphs")
        for batch in (1, 8)
    ],
    "compare_vllm": [
        {"row": "a model", "engine": engine, "batch": batch, "tok_s": 1000.0 * batch, "prefill_s": 0.0205}
        for engine in ("mini-infer", "vLLM")
        for batch in (1, 8)
    ] + [{"row": "a model", "engine": "vLLM", "prefill": 8192, "prefill_s": 0.2}],
    "expert_parallel": [
        {"routing": "skewed", "tokens": 64, "form": form, "layer_us": 1234.5, "dispatched_bytes": 700,
         "combined_bytes": 300, "ideal_dispatched_bytes": 70, "ideal_combined_bytes": 30}
        for form in ("padded", "packed", "grouped")
    ],
    "split_kv": [{"shape": "m bfloat16 bs64 1x4096", "us": 12.5, "unsplit_us": 60.5, "of_read": 0.25}],
}  # fmt: skip


def test_the_page_is_that_of_the_data(tmp_path: Path) -> None:
    shutil.copytree(DOCS / "data", tmp_path / "data")
    assert page(tmp_path) == (DOCS / "figures.md").read_text(encoding="utf-8"), "run `make figures`"
    for picture in (tmp_path / "img").glob("*.svg"):
        assert drawn(picture) == drawn(DOCS / "img" / picture.name), "run `make figures`"


def drawn(picture: Path) -> str:
    """Return the SVG without last digits of coordinates and names made of them: CPUs round logarithms differently."""
    text = re.sub(r"\bp[0-9a-f]{10}\b", "clip", picture.read_text(encoding="utf-8"))
    return re.sub(r"\d+\.\d+", lambda number: f"{float(number[0]):.2f}", text)


def test_every_chart_has_a_picture_and_a_table(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    for chart in CHARTS:
        text = "".join(json.dumps(line | MACHINE) + "\n" for line in LINES[chart.data])
        (tmp_path / "data" / f"{chart.data}.jsonl").write_text(text)
    text = page(tmp_path)
    assert "Not measured" not in text
    for row in ("| batching | 8 | 1,234 | 1,200 to 1,300 | 50% |", "| eager | 1 | 4.5 | 1,000 | one run |",
                "| a model | vLLM | one prompt of 8,192 tokens |  | 200 |",
                "| skewed | 64 | packed | 1,234.5 | 1,000 | 100 |", "| 1x4096 | 60.5 | 12.5 | 25% |"):  # fmt: skip
        assert row in text
    for chart in CHARTS:
        assert "</svg>" in (tmp_path / "img" / f"{chart.data}.svg").read_text()


def test_a_line_of_throughput_is_what_the_engine_benchmark_prints(capfd: pytest.CaptureFixture[str]) -> None:
    flags = ["--model=dry-run", "--device=cpu", "--input=8", "--output=4", "--batch=1,2", "--num-threads=1"]
    lines = measure("batching", [*flags, "--bandwidth=10"])
    assert [line["batch"] for line in lines] == [1, 2]
    assert all(line["tok_s_min"] <= line["tok_s"] <= line["tok_s_max"] for line in lines)
    assert lines[0].keys() >= LINES["throughput"][0].keys() | MACHINE.keys()
