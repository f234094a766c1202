"""`mini-infer serve` with defaults, also without wings: `make test` runs this in such a copy of the tree."""

from __future__ import annotations

from pathlib import Path

from tests.harness.served import SMALL, Served, tmp_path  # noqa: F401


def test_it_answers_and_ends(tmp_path: Path) -> None:  # noqa: F811
    served = Served(tmp_path, size=SMALL)
    try:
        served.wait_for("stop with Ctrl-C")
        answer = served.complete()
        assert answer
        assert served.complete() == answer
    finally:
        served.stop()
