"""How GPUs are divided: the search for the highest rate, and its report."""

from __future__ import annotations

import json
import os
import shlex
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cli.main import run_command
from cli.simulation.divisions import Division, WorkerCosts, cluster_of, divisions
from cli.simulation.plan import HIGHEST, LOWEST, SHARP, PlanConfig, costs_of, highest
from cli.simulation.plan_report import Found, advice, draw
from cli.simulation.settings import ClusterConfig
from common.errors import ConfigError
from tests.cli.simulation.test_simulation import write_trace
from tests.harness.cluster import ROOT
from tests.packaging.documentation import commands_of, runnable

HERE = "tests/cli/simulation/test_plan.py"


@given(st.floats(LOWEST * 2.1, HIGHEST / 2))
def test_the_highest_good_scale_is_found(limit: float) -> None:
    found = highest(lambda scale: scale <= limit)
    assert limit / SHARP <= found <= limit


def test_all_and_no_scales_may_be_good() -> None:
    assert highest(lambda scale: True) == HIGHEST
    assert highest(lambda scale: False) == 0.0


def test_divisions_of_gpus() -> None:
    assert [each.name for each in divisions(3, adaptive=False)] == ["3 for both", "1 + 2", "2 + 1"]
    assert len(divisions(3, adaptive=True)) == 5
    assert len(divisions(1, adaptive=True)) == 1


def test_divisions_into_workers_of_several_gpus() -> None:
    """Each role has its own number, and no GPU is left over."""
    made = divisions(4, adaptive=False, degrees=(1, 2, 4))
    together = [each.name for each in made if each.kind == "aggregated"]
    assert together == ["4 for both", "2xTP2 for both", "1xTP4 for both"]
    apart = {each.name for each in made} - set(together)
    assert apart == {"1 + 3", "2 + 2", "3 + 1", "2 + 1xTP2", "1xTP2 + 2", "1xTP2 + 1xTP2"}
    assert all(each.num_prefill * each.prefill_tp + each.num_decode * each.decode_tp == 4 for each in made)
    assert [each.name for each in divisions(3, adaptive=False, degrees=(2,))] == []


def test_workers_of_each_role_have_their_own_steps() -> None:
    costs = {1: WorkerCosts("base=1", 10), 2: WorkerCosts("base=0.5", 30)}
    made = cluster_of(Division("static", 2, 1, prefill_tp=1, decode_tp=2), ClusterConfig(), costs)
    assert (made.prefill_steps, made.prefill_num_gpu_blocks, made.steps, made.num_gpu_blocks) == (
        "base=1", 10, "base=0.5", 30,
    )  # fmt: skip


def test_memory_and_calibrations_say_which_numbers_of_ranks_there_are(tmp_path: Path) -> None:
    config = PlanConfig(gpus=4, model=f"{ROOT}/benchmarks/configs/llama3.3-70b")
    costs, reasons = costs_of(config, block_size=64, longest=8000)
    assert sorted(costs) == [2, 4]
    assert reasons == ["TP 1 does not fit: weights of 141 GB a GPU leave no room for KV"]
    assert sorted(costs_of(config, block_size=64, longest=400_000)[0]) == [4]
    measured = tmp_path / "tp2.json"
    measured.write_text(json.dumps({"cluster": {"steps": "base=0.02,prompt_token=1e-4", "num_gpu_blocks": 77}}))
    config = replace(config, calibrations=f"2={measured}")
    assert costs_of(config, block_size=64, longest=8000)[0][2] == WorkerCosts("base=0.02,prompt_token=1e-4", 77)
    assert sorted(costs_of(replace(config, model=""), block_size=64, longest=8000)[0]) == [2]
    with pytest.raises(ConfigError, match="--calibrations"):
        costs_of(replace(config, calibrations="2"), block_size=64, longest=8000)
    with pytest.raises(ConfigError, match="fits on no worker"):
        costs_of(PlanConfig(gpus=1, model=config.model), block_size=64, longest=8000)


def found(kind: str, rate: float) -> Found:
    return Found(Division(kind, int(kind != "aggregated"), 1), rate, {"good_requests_per_second": rate})


@pytest.mark.parametrize(
    ("rates", "told"),
    [
        ((0.0, 0.0), "No division meets the objectives"),
        ((2.0, 2.05), "Let all GPUs do both: 2.00 good requests/s"),
        ((2.0, 3.0), "1 + 1 serves 3.00 good requests/s, 1.50 times the 2.00"),
        ((0.0, 3.0), "GPUs that do both serve too few well"),
    ],
)
def test_advice(rates: tuple[float, float], told: str) -> None:
    every = sorted([found("aggregated", rates[0]), found("static", rates[1])], key=lambda each: -each.rate)
    assert told in advice(every)


def test_the_curve_is_drawn(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    path = tmp_path / "plan.png"
    draw([replace(found("static", 2.0), curve=[(0.5, 1.0), (1.0, 0.9)])], path)
    assert path.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("settings", [{"gpus": 0}, {"share": 1.5}, {"slo_ttft_ms": 0.0, "slo_itl_ms": 0.0}], ids=str)
def test_what_cannot_be_planned_is_refused(settings: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        PlanConfig(**settings)


@pytest.mark.soak
def test_prompts_between_tokens_are_worth_a_division(tmp_path: Path) -> None:
    """Long prompts and streams with a tight objective for gaps: prompts need their own worker."""
    path = tmp_path / "plan.json"
    load = ["--request-rate", "2", "--num-requests", "40", "--input-len", "2000-3000", "--output-len", "80-100"]
    assert run_command("plan", [*load, "--slo-ttft-ms", "2000", "--slo-itl-ms", "20", "--json", str(path)]) == 0
    made = json.loads(path.read_text())
    rates = {each["division"]: each["good_requests_per_second"] for each in made["divisions"]}
    assert rates["1 + 1"] > 1.3 * rates["2 for both"]
    assert made["advice"].startswith("Divide them: 1 + 1")


@pytest.mark.slow
def test_the_documented_command_advises(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    write_trace(tmp_path / "conversation_trace.jsonl")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0})  # each process imports the engine anew
    for command in commands_of(f"{HERE}::test_the_documented_command_advises"):
        _, name, *flags = shlex.split(runnable(command, ""))
        assert run_command(name, flags) == 0
        printed = capsys.readouterr()
        assert "4 for both" in printed.out + printed.err
