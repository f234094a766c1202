"""The benchmark of expert parallelism runs from its command line, and computes right results."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from benchmarks.experts import parallel as expert_parallel

SMALL = ["--hidden", "32", "--inner", "16", "--experts", "8", "--tokens", "64", "--seconds", "0", "--json"]


def test_forms_move_the_bytes_that_they_say() -> None:
    """Outputs are compared with one rank's there; a wrong one ends it with an error.

    It runs in its own process: it forks, which a process with the threads of other tests cannot.
    """
    command = [sys.executable, "-m", "benchmarks.experts.parallel", *SMALL, "--ranks", "2"]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    assert [line["routing"] for line in lines] == ["uniform"] * 3 + ["skewed"] * 3
    padded, packed, grouped = lines[:3]
    assert padded["dispatched_bytes"] == 64 * (32 * 4 + 2 * 8)
    assert padded["combined_bytes"] == 64 * 32 * 4
    for line in (packed, grouped, *lines[4:]):
        assert line["dispatched_bytes"] == line["ideal_dispatched_bytes"] < padded["dispatched_bytes"]
        assert line["combined_bytes"] == line["ideal_combined_bytes"] < padded["combined_bytes"]
        assert line["layer_us"] > 0
    assert lines[5]["dispatched_bytes"] < grouped["dispatched_bytes"]  # most rows of rank 0 stay there


@pytest.mark.parametrize(
    "flags", [["--ranks", "3"], ["--ranks", "1"], ["--routing", "odd"], ["--ranks", "2", "--redundant", "2"]]
)
def test_what_cannot_be_divided_is_refused(flags: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        expert_parallel.main([*SMALL, *flags])
    assert "--r" in capsys.readouterr().err


@pytest.mark.parametrize("placement", ["balanced", "rebalanced"])
def test_a_balanced_placement_of_skewed_experts(placement: str, capfd: pytest.CaptureFixture[str]) -> None:
    """Outputs are compared with the plain whole layer's there."""
    flags = ["--ranks", "2", "--routing", "skewed", "--placement", placement, "--redundant", "2"]
    assert expert_parallel.main([*SMALL, *flags]) == 0
    lines = [json.loads(line) for line in capfd.readouterr().out.splitlines()]
    assert [line["form"] for line in lines] == ["padded", "packed", "grouped"]
    for line in lines:
        assert line["imbalance"] < 1.2
        assert (line.get("move_us", 0) > 0) == (line.get("moved", 0) > 0) == (placement == "rebalanced")
    for line in lines[1:]:
        assert line["dispatched_bytes"] == line["ideal_dispatched_bytes"]
