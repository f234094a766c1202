"""Adapter configs, supported and refused, and --lora-modules in vLLM's two forms."""

from __future__ import annotations

import argparse
import json
import math
from pathlib import Path
from typing import Any

import pytest

from common.config import add_arguments, from_namespace, to_argv
from common.errors import ConfigError
from common.lora.adapter_config import read_adapter_config
from common.lora.adapter_ref import AdapterRef
from common.lora.modules import LoraModule, parse_lora_modules
from router.config import RouterConfig
from router.lora.settings import LoraModuleSettings

pytestmark = pytest.mark.wing("common.lora")
PLAIN = {"peft_type": "LORA", "r": 8, "lora_alpha": 16, "bias": "none", "use_dora": False, "modules_to_save": None}


def write(folder: Path, **fields: Any) -> Path:
    (folder / "adapter_config.json").write_text(json.dumps({**PLAIN, **fields}))
    return folder


def test_ranks_and_scales(tmp_path: Path) -> None:
    config = read_adapter_config(write(tmp_path))
    assert (config.rank_of("model.layers.0.mlp.up_proj"), config.scale_of("lm_head"), config.max_rank) == (8, 2.0, 8)
    patterns = {"rank_pattern": {"q_proj": 32, r"layers\.1\.mlp\..*": 2}, "alpha_pattern": {"q_proj": 8}}
    config = read_adapter_config(write(tmp_path, use_rslora=True, **patterns))
    assert config.max_rank == 32
    assert config.rank_of("model.layers.1.mlp.up_proj") == 2
    assert config.rank_of("model.layers.1.self_attn.xq_proj") == 8
    assert config.scale_of("model.layers.0.self_attn.q_proj") == 8 / math.sqrt(32)
    assert config.scale_of("model.layers.0.self_attn.k_proj") == 16 / math.sqrt(8)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"use_dora": True}, "DoRA adapters are not supported"),
        ({"bias": "lora_only"}, "trained biases"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save"),
        ({"peft_type": "IA3"}, "peft_type 'IA3' is not supported"),
        ({"init_lora_weights": "pissa_niter_16"}, "belongs to other weights"),
        ({"r": 0}, "r 0 is no rank"),
        ({"r": "8"}, "r '8' is no rank"),
        ({"lora_alpha": None}, "lora_alpha None is no number"),
        ({"rank_pattern": {"q_proj": -1}}, "rank_pattern -1 is no rank"),
        ({"rank_pattern": {"(": 1}}, "damaged pattern"),
        ({"alpha_pattern": [1]}, "alpha_pattern is no object"),
        ({"target_parameters": ["mlp.experts.gate_up_proj"]}, "target_parameters"),
    ],
)
def test_configs_that_are_refused(fields: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as refused:
        read_adapter_config(write(tmp_path, **fields))
    assert message in str(refused.value)


def test_a_reference_says_where_and_which_files(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"has no adapter_config\.json"):
        AdapterRef.of(tmp_path)
    write(tmp_path)
    with pytest.raises(ConfigError, match=r"has no adapter_model\.safetensors"):
        AdapterRef.of(tmp_path)
    (tmp_path / "adapter_model.safetensors").write_bytes(b"weights")
    ref = AdapterRef.of(tmp_path)
    assert AdapterRef.parse(str(ref)) == ref
    ref.check()
    (tmp_path / "adapter_model.safetensors").write_bytes(b"others!")
    with pytest.raises(ConfigError, match="has changed since it was loaded"):
        ref.check()
    (tmp_path / "adapter_config.json").write_text("{")
    with pytest.raises(ConfigError, match="is damaged"):
        read_adapter_config(tmp_path)


BOTH = 'a=/x/y {"name": "b", "path": "/x/../z", "base_model_name": "m"}  c=/w=1'
MODULES = [LoraModule("a", Path("/x/y")), LoraModule("b", Path("/z"), "m"), LoraModule("c", Path("/w=1"))]


def test_pairs_and_json() -> None:
    assert parse_lora_modules(BOTH) == MODULES
    assert parse_lora_modules(" ") == []
    assert parse_lora_modules("a=x")[0].folder == Path.cwd() / "x"


@pytest.mark.parametrize("text", ["a", "=x", "a=", '{"name": "a"}', '{"name": "a", "path": 1}', '{"name"', "a=x a=y",
                                  '{"name": "a", "path": "/x", "is_3d": 1}'])  # fmt: skip
def test_modules_that_are_refused(text: str) -> None:
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
