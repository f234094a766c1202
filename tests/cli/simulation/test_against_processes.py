"""Simulated time against a clock: router, workers and transfers are real, and steps last as long as here."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from cli.main import run_command
from tests.harness.cluster import metric, running_cluster

NAMES = ("time_to_first_token", "inter_token_latency", "e2e_request_latency")
STEPS = "base=0.03,row=3e-5,context=1e-7,prompt=0.005,prompt_token=2e-4,prompt_context=0"
TRIES = 3  # a busy machine delays real requests, and never hastens them


@pytest.mark.slow
@pytest.mark.wing("engine.simulated")
def test_real_processes_take_as_long(tmp_path: Path) -> None:
    """First tokens, gaps and requests are within 10%."""
    rows = [f"2023-11-16 18:15:{46 + n / 5:010.7f},{20 + 37 * n % 300},{5 + 11 * n % 30}" for n in range(30)]
    trace, found = tmp_path / "trace.csv", tmp_path / "found.json"
    trace.write_text("\n".join(["TIMESTAMP,ContextTokens,GeneratedTokens", *rows]))
    load = ["--trace", str(trace), "--vocab-size", "250", "--warmup", "0", "--json", str(found)]
    engine = (
        "--model=dry-run", "--num-gpu-blocks=1000", "--num-threads=1", f"--simulated-steps={STEPS}",
        "--max-num-seqs=64", "--max-num-batched-tokens=1024", "--no-prefix-cache",
    )  # fmt: skip
    workers = ["--prefill-workers=1", "--decode-workers=2", "--max-num-batched-tokens=1024"]
    sizes = ["--num-gpu-blocks=1000", "--block-size=16", "--max-num-seqs=64", f"--steps={STEPS}"]
    assert run_command("simulate", [*load, *workers, *sizes]) == 0
    simulated = json.loads(found.read_text())
    expected = [simulated[shown]["mean"] for shown in ("ttft_ms", "itl_ms", "e2e_ms")]
    with running_cluster(1, 2, engine_args=engine) as cluster:
        for _ in range(TRIES):
            before = [sums_of(cluster.url, name) for name in NAMES]
            assert run_command("bench", [*load, "--url", cluster.url]) == 0
            after = [sums_of(cluster.url, name) for name in NAMES]
            real = [mean_between(*each) for each in zip(before, after, strict=True)]
            if real == pytest.approx(expected, rel=0.1):
                break
        assert run_command("simulate", [*load, *workers, "--like", cluster.url]) == 0
    assert real == pytest.approx(expected, rel=0.1)


def sums_of(url: str, name: str) -> tuple[float, float]:
    """Sum and count of the router's histogram: a client sees no token before its characters are whole."""
    total, count = (metric(url, rf"vllm:{name}_seconds_{part}{{.*}}") for part in ("sum", "count"))
    return total, count


def mean_between(before: tuple[float, float], after: tuple[float, float]) -> float:
    """Milliseconds."""
    return 1e3 * (after[0] - before[0]) / (after[1] - before[1])
