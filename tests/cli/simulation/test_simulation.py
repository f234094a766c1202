"""Clusters in simulated time: results known beforehand, and those of real processes."""

from __future__ import annotations

import json
import random
import shlex
from dataclasses import astuple, replace
from pathlib import Path
from typing import Any

import pytest

from cli.load.results import Objectives, summarize
from cli.load.workload import PlannedRequest
from cli.main import run_command
from cli.simulation.against import Sent, _simulated, fitted
from cli.simulation.calibration import PARTS, calibrated_by
from cli.simulation.cluster import SimulatedCluster
from cli.simulation.settings import ClusterConfig
from cli.simulation.simulate import run
from cli.simulation.specs import spec_of
from common.errors import ConfigError
from engine.simulated.step_cost import SimulatedCost
from tests.packaging.documentation import commands_of, runnable

HERE = "tests/cli/simulation/test_simulation.py"

NO_NOISE = "engine.simulated.runner.NOISE"
STEPS = "base=0.01,row=0.0001,context=0,prompt=0.002,prompt_token=0.0001,prompt_context=0"


def config(**settings: Any) -> ClusterConfig:
    return ClusterConfig(**{"steps": STEPS, "block_size": 16, "num_gpu_blocks": 1000, "accept_ms": 0.0, **settings})


def planned(at_seconds: float, num_prompt: int, num_output: int, seed: int = 0) -> PlannedRequest:
    return PlannedRequest(at_seconds, random.Random(seed).choices(range(100, 50_000), k=num_prompt), num_output)


def simulate(made: ClusterConfig, requests: list[PlannedRequest], seed: int = 0) -> SimulatedCluster:
    cluster = SimulatedCluster(spec_of(made), seed)
    cluster.run(requests)
    assert len(cluster.records) == len(requests)
    assert not cluster._open
    for worker in cluster._workers.values():
        assert (worker.kv.pool.num_used, worker.num_legs) == (0, 0)
        backlog = worker.backlog
        assert (backlog.num_rows, worker.num_expected, backlog.prompt_tokens, backlog.context_tokens) == (0, 0, 0, 0)
        worker.kv.pool.check_integrity()
    return cluster


@pytest.fixture(autouse=True)
def without_noise(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cli.simulation.worker.NOISE", (1.0, 1.0))
    monkeypatch.setattr("cli.simulation.transfers.Random.expovariate", lambda _self, rate: 1 / rate)


def test_one_request_takes_what_its_steps_take() -> None:
    [record] = simulate(config(), [planned(1.0, 100, 5)]).records
    assert (record.scheduled, record.num_prompt_tokens, len(record.chunk_times)) == (1.0, 100, 5)
    assert record.ttft == pytest.approx(3 * 0.0005 + 0.002 + 100 * 0.0001)  # three messages and a prompt
    assert record.gaps == pytest.approx([0.0101] * 4)
    assert record.end == record.chunk_times[-1]


def test_clients_of_a_closed_loop_wait_for_answers() -> None:
    cluster = SimulatedCluster(spec_of(config()))
    cluster.run_closed([planned(0.0, 100, 5, seed=number) for number in range(7)], concurrency=2)
    records = sorted(cluster.records, key=lambda record: record.sent)
    assert [record.sent for record in records[:2]] == [0.0, 0.0]
    ends = sorted(record.end for record in records)
    assert [record.sent for record in records[2:]] == pytest.approx(ends[:5])
    cut = SimulatedCluster(spec_of(config()))
    cut.run_closed((planned(0.0, 100, 5, seed=number) for number in range(100)), concurrency=2, until=ends[3])
    assert len(cut.records) == 5


def test_a_prompt_goes_from_worker_to_worker() -> None:
    made = config(prefill_workers=1, pull_tokens_per_second=1000.0)
    cluster = simulate(made, [planned(0.0, 100, 5), planned(0.0, 20, 3, seed=1), planned(0.0, 80, 1, seed=2)])
    assert cluster.num_decisions == {"disaggregated": 2, "local": 1}
    first = next(record for record in cluster.records if record.num_prompt_tokens == 100)
    # Two messages, the pull, the step that its second token comes of, and what ran there then.
    assert 0.102 + 0.01 < first.gaps[0] < 0.102 + 3 * 0.0101
    assert first.gaps[1:] == pytest.approx([0.0101] * 3, rel=0.02)


def test_chunks_are_pulled_while_the_rest_of_a_prompt_is_computed() -> None:
    """Only the last chunk is pulled after the first token: 9 ms, in two messages and before a step."""
    made = config(prefill_workers=1, pull_tokens_per_second=10_000.0, max_num_seqs=8, max_num_batched_tokens=80)
    cluster = simulate(made, [planned(0.0, 800, 3)])
    assert cluster.records[0].gaps == pytest.approx([0.001 + 0.009 + 0.0101, 0.0101])


def test_prompts_share_their_beginning() -> None:
    shared = random.Random(5).choices(range(100, 50_000), k=160)
    requests = [PlannedRequest(0.5 * number, [*shared, number], 2) for number in range(4)]
    cluster = simulate(config(decode_workers=3), requests)
    assert [record.num_cached_tokens for record in cluster.records] == [0, 160, 160, 160]
    assert cluster.records[1].ttft < 0.7 * cluster.records[0].ttft


@pytest.mark.parametrize(
    "settings", [{}, {"prefill_workers": 2}, {"prefill_workers": 1, "num_gpu_blocks": 40}], ids=str
)
def test_a_load_is_the_same_by_its_seed(settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Also if KV blocks are scarce, and requests are preempted or wait."""
    monkeypatch.setattr("cli.simulation.worker.NOISE", (0.9, 1.1))
    rng = random.Random(1)
    load = [planned(0.02 * n, rng.randrange(1, 300), rng.randrange(1, 40), n) for n in range(60)]
    made = config(decode_workers=2, **settings)
    runs = [simulate(made, load, seed).records for seed in (3, 3, 4)]
    times = [[(record.num_prompt_tokens, record.chunk_times) for record in records] for records in runs]
    assert times[0] == times[1] != times[2]
    for record in runs[0]:
        assert record.num_output_tokens == len(record.chunk_times)
        assert all(gap > 0 for gap in record.gaps)


def test_objectives_place_by_prediction() -> None:
    """As the adaptive router does, with prompts in chunks that keep the gaps."""
    rng = random.Random(2)
    load = [planned(0.1 * n, rng.randrange(200, 600), 30, n) for n in range(80)]
    plain, kept = (
        summarize(simulate(made, load).records, 8.0, Objectives())
        for made in (config(), config(ttft_objective_ms=1000.0, itl_objective_ms=30.0))
    )
    assert kept["itl_ms"]["p99"] < 0.7 * plain["itl_ms"]["p99"]
    assert kept["itl_ms"]["p99"] < 35.0


def test_requests_that_a_prefill_worker_keeps_move_when_prompts_come() -> None:
    """No token is lost or given twice; `simulate` checks that each worker is empty afterwards."""
    rng = random.Random(4)
    load = [planned(0.12 * n, rng.randrange(200, 500), 150, n) for n in range(60)]
    cluster = simulate(config(prefill_workers=1, ttft_objective_ms=1000.0, itl_objective_ms=30.0), load)
    assert cluster.num_decisions["kept"] > 3
    assert 0 < cluster.num_decisions["move"] <= cluster.num_decisions["kept"]
    assert all(len(record.chunk_times) == 150 for record in cluster.records)
    assert not cluster._kept


def test_prompts_beside_streams_may_take_longer_than_their_parts() -> None:
    load = [planned(0.0, 50, 20), planned(0.05, 100, 2, seed=1)]
    gaps = [simulate(config(mixed_ms=mixed), load).records[-1].gaps for mixed in (0.0, 7.0)]
    assert max(gaps[1]) - max(gaps[0]) == pytest.approx(0.007)


@pytest.mark.wing("kvstore.tier")
def test_evicted_blocks_come_back_from_the_hosts_memory() -> None:
    load = [planned(0.0, 200, 3), planned(1.0, 220, 3, seed=1), planned(2.0, 200, 3), planned(3.0, 200, 3, seed=2)]
    made = config(num_gpu_blocks=16, host_tokens_per_second=1000.0)
    without, with_tier = (simulate(replace(made, host_tier_blocks=blocks), load) for blocks in (0, 100))
    assert [each.num_cached_tokens for each in with_tier.records] == [0, 0, 192, 0]
    assert [each.num_cached_tokens for each in without.records] == [0, 0, 32, 0]
    seconds = 3 * 0.0005 + 0.002 + 8 * 0.0001
    assert with_tier.records[2].ttft == pytest.approx(seconds + (192 - 32) / 1000.0)


@pytest.mark.wing("kvstore.tier")
def test_workers_of_a_host_share_its_memory() -> None:
    made = config(decode_workers=3, host_tier_blocks=8, workers_per_host=2)
    workers = SimulatedCluster(spec_of(made))._workers.values()
    first, second, other = (worker.kv.host_tier for worker in workers)  # type: ignore[attr-defined]
    assert first is second is not other


def write_trace(path: Path) -> None:
    """Write nine requests, in groups of three that share a prefix."""
    rows = [
        {"timestamp": 3000 * (n // 3), "input_length": 600, "output_length": 9, "hash_ids": [0, n]} for n in range(9)
    ]
    path.write_text("\n".join(map(json.dumps, rows)))


def test_the_documented_commands_report(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    write_trace(tmp_path / "conversation_trace.jsonl")
    monkeypatch.chdir(tmp_path)
    commands = commands_of(f"{HERE}::test_the_documented_commands_report")
    for command in commands:
        _, name, *flags = shlex.split(runnable(command, ""))
        assert run_command(name, flags) == 0
        assert ("9/9 requests" if "--trace" in flags else "30/30 requests") in capsys.readouterr().err
    assert len(commands) >= 2


def test_the_command_reports_as_bench_does(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace, found = tmp_path / "trace.jsonl", tmp_path / "found.json"
    write_trace(trace)
    assert run_command("simulate", ["--trace", str(trace), "--decode-workers", "2", "--json", str(found)]) == 0
    summary = json.loads(found.read_text())
    assert summary["num_completed"] == 9
    assert summary["cached_tokens"] > 0
    assert summary["placements"] == {"local": 9}
    assert "9/9 requests" in capsys.readouterr().err
    assert run_command("simulate", ["--num-requests", "9", "--concurrency", "2"]) == 0
    assert "9/9 requests" in capsys.readouterr().err
    with pytest.raises(ConfigError, match="--decode-workers must be positive"):
        run(["--decode-workers", "0"])


def worker(**parts: float) -> dict[str, Any]:
    return {
        "block_size": 16, "max_num_seqs": 8, "load": {"kv_blocks": 500},
        "step_seconds_by_part": {**dict.fromkeys(PARTS, 0.0), "spread": 1.1, **parts},
    }  # fmt: skip


@pytest.mark.parametrize(("num_prefill", "per_pair"), [(0, 0.0), (1, 0.0), (1, 3e-7)])
def test_settings_are_fitted_to_a_load(num_prefill: int, per_pair: float) -> None:
    """The measurements are those of a simulation with other settings."""
    real = STEPS.replace("prompt_context=0", f"prompt_context={per_pair}")
    given = config(prefill_workers=num_prefill, decode_workers=2, hop_ms=2.0, accept_ms=1.5, steps=real)
    rng = random.Random(6)
    loads = [
        [planned(gap * n, rng.randrange(70, 400), length, n) for n in range(40)]
        for gap, length in ((0.1, 20), (0.5, 2))
    ]
    crowd, alone = (Sent(load, _simulated(given, Sent(load, []))) for load in loads)
    steps = "base=0.012,row=0.0001,context=0,prompt=0.002,prompt_token=0.00007,prompt_context=1e-7"
    made = fitted(replace(given, steps=steps, hop_ms=0.5, accept_ms=0.0), crowd, alone)
    assert astuple(SimulatedCost.parse(made.steps)) == pytest.approx(
        astuple(SimulatedCost.parse(real)), rel=0.01, abs=1e-8
    )
    assert 3 * made.hop_ms + made.accept_ms == pytest.approx(7.5, rel=0.02)
    assert made.hop_ms == pytest.approx(2.0 if num_prefill else 0.5, rel=0.02)


def test_a_running_cluster_tells_what_steps_take() -> None:
    """Of a prefill worker only the cost of prompts is known. A low base goes with the high cost of a row."""
    workers = [worker(prompt_token=1e-4), worker(base=0.01, row=1e-3), worker(base=0.02), {"state": "connecting"}]
    made = calibrated_by(config(like="http://there"), workers)
    assert astuple(SimulatedCost.parse(made.steps)) == pytest.approx(
        astuple(SimulatedCost(base=0.015, row=5e-4, prompt_token=1e-4))
    )
    assert (made.num_gpu_blocks, made.block_size, made.max_num_seqs) == (500, 16, 8)
    with pytest.raises(ConfigError, match="send it a load first"):
        calibrated_by(config(like="http://there"), workers[:1])
