"""Numbers of settings from the command line and the environment."""

from __future__ import annotations

import argparse
from dataclasses import dataclass

import pytest

from common.config import SettingsParser, add_arguments, from_namespace, setting
from common.errors import ConfigError


@dataclass(frozen=True)
class Sizes:
    kv_gb: float = setting(0.5, "of KV")


def parse(*argv: str, **env: str) -> Sizes:
    parser = SettingsParser(prog="program")
    add_arguments(parser, Sizes)
    return from_namespace(Sizes, parser.parse_args(argv), env)


@pytest.mark.parametrize("text", ["nan", "inf", "-Infinity", "two"])
def test_numbers_are_finite(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse(f"--kv-gb={text}")
    assert f"argument --kv-gb: {text!r} is not a finite number" in capsys.readouterr().err
    with pytest.raises(ConfigError, match=f"MINI_INFER_KV_GB='{text}': expected a finite number"):
        parse(MINI_INFER_KV_GB=text)
    assert parse("--kv-gb", "1e3", MINI_INFER_KV_GB=text).kv_gb == 1000
    assert from_namespace(Sizes, argparse.Namespace(), {}).kv_gb == 0.5
