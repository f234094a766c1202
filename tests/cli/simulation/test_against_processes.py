"""Simulated time against a clock: router, workers and transfers are real, and steps take given times."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from benchmarks.model_folder import with_tokenizer
from cli.main import run_command
from tests.harness.cluster import ROOT, running_cluster

STEPS = "base=0.05,row=5e-5,context=2e-7,prompt=0.0075,prompt_token=6e-4,prompt_context=0"
TRIES = 3  # accidents of a busy machine make one figure or another longer, seldom the same one three times


@pytest.mark.slow
@pytest.mark.wing("engine.simulated")
def test_real_processes_take_as_long(tmp_path: Path) -> None:
    """For a trace that it was not calibrated with. 32 requests among other tests are within three times the targets
    (docs/benchmarks.md), and their 99th percentiles, which are single requests, within four times."""
    rows = [f"2023-11-16 18:15:{46 + n / 4:010.7f},{20 + 37 * n % 300},{5 + 11 * n % 30}" for n in range(32)]
    trace, found = tmp_path / "trace.csv", tmp_path / "found.json"
    trace.write_text("\n".join(["TIMESTAMP,ContextTokens,GeneratedTokens", *rows]))
    model, vocab_size = with_tokenizer([f"--model={ROOT}/benchmarks/configs/one-layer"], tmp_path)
    engine = (
        *model, "--load-format=dummy", "--num-gpu-blocks=1000", "--num-threads=1", f"--simulated-steps={STEPS}",
        "--max-num-seqs=64", "--max-num-batched-tokens=1024",
    )  # fmt: skip
    load = ["--trace", str(trace), "--vocab-size", str(vocab_size), "--num-requests", "20", "--request-rate", "4"]
    lengths = ["--input-len", "20-320", "--output-len", "5-35", "--max-num-batched-tokens", "1024"]
    with running_cluster(1, 2, engine_args=engine) as cluster:
        missed: set[str] = set()
        for seed in range(TRIES):  # others have new prompts, which no cache holds
            flags = ["--against", cluster.url, "--seed", str(100 * seed), "--pull-tokens-per-second", "1e7"]
            assert run_command("simulate", [*load, *lengths, *flags, "--json", str(found)]) == 0
            compared = json.loads(found.read_text())["compared"]
            beyond = {row["name"] for row in compared if abs(row["error"]) > allowed(row["name"], row["target"])}
            missed = missed & beyond if seed else beyond
            if not missed:
                break
    assert not missed


def allowed(name: str, target: float) -> float:
    """Return the allowed error of a figure; without a target any is allowed."""
    if not target:
        return math.inf
    return (4 if "p99" in name else 3) * target
