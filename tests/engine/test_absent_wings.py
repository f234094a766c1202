"""Errors of an engine that needs a wing which this installation lacks, in the copy of tests/wings.py."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from common.errors import ConfigError, InvalidRequestError, UnsupportedModelError
from common.model_files import resolve_model
from common.wings import has_wing
from engine.assembly import assemble, size_pool
from engine.config import EngineConfig, GpuConfig
from engine.kv.memory import PoolMemory
from engine.loader.random_weights import DRY_RUN_CONFIG
from engine.models.families import family_of
from engine.ranks import Ranks
from engine.request import SamplingParams
from tests.engine.tiny_models import TINY_MODELS, edit_config

pytestmark = pytest.mark.skipif(has_wing("engine.tensor_parallel"), reason="this installation has its wings")


@pytest.mark.parametrize(
    ("settings", "asked_by", "wing"),
    [
        ({"tp": 2}, "--tp", "engine.tensor_parallel"),
        ({"pp": 2}, "--pp", "engine.tensor_parallel"),
        ({"quant_mode": "int8-weight"}, "--quant-mode int8-weight", "engine.quantization"),
    ],
)
def test_flags_of_wings_are_refused(settings: dict[str, Any], asked_by: str, wing: str) -> None:
    with pytest.raises(ConfigError, match=f"^{asked_by} needs {wing}, which this installation lacks$"):
        assemble(EngineConfig("dry-run", **settings))


def test_a_node_agent_is_refused() -> None:
    memory = PoolMemory()
    memory.agent_socket = "agent.sock"
    with pytest.raises(ConfigError, match=r"^--agent-socket needs kvstore\.tier, which this installation lacks$"):
        assemble(EngineConfig("dry-run"), memory)


def test_a_gpu_is_refused_whose_pool_has_no_size() -> None:
    loaded: Any = SimpleNamespace(config=DRY_RUN_CONFIG, device=torch.device("cuda"))
    told = "^a GPU without --kv-cache-gb or --num-gpu-blocks needs engine.memory_profiling"
    with pytest.raises(ConfigError, match=told):
        size_pool(loaded, EngineConfig("dry-run"), GpuConfig(), Ranks(), None)


def test_settings_of_wings_are_not_known() -> None:
    names = {field.name for field in fields(EngineConfig)}
    wings = {
        "num_speculative_tokens", "itl_objective_ms", "expert_parallel", "expert_load_file", "simulated_steps",
        "model_impl",
    }  # fmt: skip
    assert not wings & names
    assert {"tp", "pp"} < names


def test_models_of_wings_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModelError, match=r"'DeepseekV3ForCausalLM' is not.*not installed: .*engine\.mla"):
        family_of("DeepseekV3ForCausalLM")
    with pytest.raises(UnsupportedModelError, match=r"not installed: .*engine\.moe"):
        family_of("Qwen3MoeForCausalLM")
    with pytest.raises(UnsupportedModelError, match=r"not installed: engine\.fused\.phi3"):
        family_of("Phi3ForCausalLM")
    (tmp_path / "model.gguf").touch()
    with pytest.raises(ConfigError, match=r"^model\.gguf needs common\.gguf"):
        resolve_model(str(tmp_path / "model.gguf"))
    path = TINY_MODELS["mistral-window"].save(tmp_path / "windows")
    with pytest.raises(ConfigError, match=r"^a model with sliding windows needs engine\.windows"):
        assemble(EngineConfig(str(path), device="cpu", num_gpu_blocks=64))


def test_partial_rotary_embedding_is_refused(tmp_path: Path) -> None:
    path = TINY_MODELS["llama"].save(tmp_path / "m")
    edit_config(path, partial_rotary_factor=0.5)
    with pytest.raises(ConfigError, match=r"^a checkpoint with fused weights .* needs engine\.fused"):
        assemble(EngineConfig(str(path), device="cpu", num_gpu_blocks=64))


def test_quantized_checkpoints_are_refused(tmp_path: Path) -> None:
    path = TINY_MODELS["llama"].save(tmp_path / "m")
    edit_config(path, quantization_config={"quant_method": "gptq"})
    with pytest.raises(ConfigError, match=r"^a quantized checkpoint needs engine\.quantization"):
        assemble(EngineConfig(str(path), device="cpu", num_gpu_blocks=64))


def test_grammars_are_refused() -> None:
    engine = assemble(EngineConfig("dry-run", device="cpu", num_gpu_blocks=64)).engine
    with pytest.raises(InvalidRequestError, match=r"engine\.grammar"):
        engine.add_request([1], SamplingParams(grammar="regex:a"))
    assert not engine.has_work()


def test_changes_of_logits_are_refused() -> None:
    engine = assemble(EngineConfig("dry-run", device="cpu", num_gpu_blocks=64)).engine
    for params in (SamplingParams(presence_penalty=0.5), SamplingParams(logit_bias=((1, 2.0),))):
        with pytest.raises(InvalidRequestError, match=r"penalties, biases and masks .*engine\.logit_rules"):
            engine.add_request([1], params)
    assert not engine.has_work()


def test_priorities_are_refused_to_the_client() -> None:
    engine = assemble(EngineConfig("dry-run", device="cpu", num_gpu_blocks=64)).engine
    with pytest.raises(InvalidRequestError, match=r"priorities .*engine\.priorities") as caught:
        engine.add_request([1], SamplingParams(), priority=1)
    assert caught.value.param == "priority"
    assert not engine.has_work()


def test_log_probabilities_are_refused_to_the_client() -> None:
    engine = assemble(EngineConfig("dry-run", device="cpu", num_gpu_blocks=64)).engine
    for params in (SamplingParams(logprobs=0), SamplingParams(prompt_logprobs=1)):
        with pytest.raises(InvalidRequestError, match=r"log-probabilities .*engine\.logprobs") as caught:
            engine.add_request([1], params)
        assert caught.value.param == "logprobs"
    assert not engine.has_work()


def test_vectors_are_refused_to_the_client() -> None:
    engine = assemble(EngineConfig("dry-run", device="cpu", num_gpu_blocks=64)).engine
    with pytest.raises(InvalidRequestError, match=r"engine\.pooling") as caught:
        engine.add_request([1], SamplingParams(max_tokens=1, pooling="last"))
    assert caught.value.param == "pooling"
    assert not engine.has_work()
