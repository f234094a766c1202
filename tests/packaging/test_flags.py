"""Flags, variables, defaults and help stay what they are, wherever a setting is declared."""

from __future__ import annotations

from pathlib import Path

from tests.packaging.flags import lines


def test_flags_are_those_listed() -> None:
    listed = Path(__file__).with_name("flags.txt").read_text(encoding="utf-8").splitlines()
    assert lines() == listed, "run `python -m tests.packaging.flags > tests/packaging/flags.txt`"
