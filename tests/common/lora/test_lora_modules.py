"""--lora-modules in vLLM's two forms, as a flag with several values and as a variable."""

from __future__ import annotations

import argparse
from pathlib import Path

import pytest

from common.config import add_arguments, from_namespace, to_argv
from common.errors import ConfigError
from common.lora.modules import LoraModule, parse_lora_modules
from router.config import RouterConfig
from router.lora.settings import LoraModuleSettings

pytestmark = pytest.mark.wing("common.lora")
BOTH = 'a=/x/y {"name": "b", "path": "/x/../z", "base_model_name": "m"}  c=/w=1'
MODULES = [LoraModule("a", Path("/x/y")), LoraModule("b", Path("/z"), "m"), LoraModule("c", Path("/w=1"))]


def test_pairs_and_json() -> None:
    assert parse_lora_modules(BOTH) == MODULES
    assert parse_lora_modules(" ") == []
    assert parse_lora_modules("a=x")[0].folder == Path.cwd() / "x"


@pytest.mark.parametrize("text", ["a", "=x", "a=", '{"name": "a"}', '{"name": "a", "path": 1}', '{"name"', "a=x a=y",
                                  '{"name": "a", "path": "/x", "is_3d": 1}'])  # fmt: skip
def test_what_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="--lora-modules"):
        parse_lora_modules(text)


def test_a_flag_takes_several_values() -> None:
    parser = argparse.ArgumentParser()
    add_arguments(parser, RouterConfig)

    def modules_of(*argv: str, **env: str) -> list[LoraModule]:
        config = from_namespace(RouterConfig, parser.parse_args(argv), {"MINI_INFER_DECODE": "h:1", **env})
        again = from_namespace(RouterConfig, parser.parse_args(to_argv(config)), {})
        assert again == config
        return parse_lora_modules(config.of(LoraModuleSettings).lora_modules)

    flags = ("--lora-modules", "a=/x/y", '{"name": "b", "path": "/z", "base_model_name": "m"}', "c=/w=1")
    assert modules_of(*flags, "--port", "1") == MODULES
    assert modules_of(MINI_INFER_LORA_MODULES=BOTH) == MODULES
    assert modules_of() == []
