"""The scaling benchmark of replicas: how even shares are, and a run of it."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from benchmarks.clusters.replicas import balance


def test_balance_is_the_largest_share_over_an_equal_one() -> None:
    assert balance([30.0, 10.0]) == {"shares": [0.75, 0.25], "max_over_mean": 1.5}
    assert balance([7.0, 7.0, 7.0])["max_over_mean"] == 1.0
    assert balance([0.0, 0.0]) == {"shares": [0.0, 0.0], "max_over_mean": 0.0}


@pytest.mark.soak
def test_replicas_are_measured_one_number_after_the_other() -> None:
    flags = ["--replicas=1,2", "--clients=2", "--output=16", "--seconds=3", "--model=dry-run", "--num-threads=1"]
    command = [sys.executable, "-m", "benchmarks.clusters.replicas", *flags]
    found = subprocess.run(command, capture_output=True, text=True, timeout=280, check=True)
    one, two = map(json.loads, found.stdout.splitlines())
    assert (one["replicas"], one["clients"], one["shares"], one["scaling"]) == (1, 2, [1.0], 1.0)
    assert (two["replicas"], two["clients"]) == (2, 4)
    assert sum(two["shares"]) == pytest.approx(1.0, abs=0.01)
    for figures in (one, two):
        assert figures["tok_s"] > 0
        assert figures["requests"] > 0
        assert set(figures["errors"]) <= {"timeout"}
