"""Flags, modes and variables of other programs, and misspelt ones."""

from __future__ import annotations

import re

import pytest

from cli.cluster.flags import GROUPS, build_parser, parse_config
from cli.hints.variables import misspelt_variables
from cli.hints.vllm import INSTEAD_OF_VLLM
from common.errors import ConfigError


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        (["--quant-mode=w8a16"], "use int8-weight"),
        (["--quant-mode", "w8a16"], "use int8-weight"),
        (["--quant-mode=fp4"], "choose one of auto, none, int8-weight"),
    ],
)
def test_modes_of_other_programs_say_what_to_do(flags: list[str], told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        parse_config(flags, {})


def test_what_takes_the_place_of_flags_of_vllm_exists() -> None:
    known = build_parser()._option_string_actions
    for flag, told in INSTEAD_OF_VLLM.items():
        assert flag not in known
        assert set(re.findall(r"--[\w-]+", told)) <= known.keys()


def test_a_quantization_of_other_programs_in_the_environment() -> None:
    with pytest.raises(ConfigError, match="use int8-weight"):
        parse_config([], {"MINI_INFER_QUANT_MODE": "w8a16"})
    assert parse_config(["--quant-mode=none"], {"MINI_INFER_QUANT_MODE": "w8a16"}).engine.quant_mode == "none"


def test_a_misspelt_variable_is_named() -> None:
    env = {"MINI_INFER_MODLE": "x", "MINI_INFER_QUANT_MODE": "none", "MINI_INFER_IMAGE": "ours:1", "MODLE": "y"}
    settings = [cls for _, cls in GROUPS]
    assert misspelt_variables(env, *settings) == ["MINI_INFER_MODLE is not read: did you mean MINI_INFER_MODEL?"]
