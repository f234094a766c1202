"""Mixtures of experts in addition to the tests of all families: quantized, random, packed checkpoints, on a GPU."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from benchmarks.profile.floors import num_weights, weight_bytes
from common.errors import ConfigError, UnsupportedModelError
from engine.config import EngineConfig
from engine.loader.load import load_model
from engine.loader.safetensors import SafetensorsWeights
from engine.moe.config import MoeConfig
from engine.moe.expert_stacks import StackedExperts
from engine.moe.hf_config import moe_from_hf
from engine.moe.moe import Expert, Moe
from engine.moe.routing import choose_experts
from engine.quantization import conversion
from engine.quantization.cpu_linears import int4, int8
from engine.quantization.gpu_linears import GpuLinears
from tests.engine.driving import directory, generate, open_model, random_prompt, read_prompt
from tests.engine.quantization.packed_files import FORMATS, SIZES, write
from tests.engine.tiny_models import TINY_MODELS, VOCAB_SIZE, TinyModel, edit_config

EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64, "norm_topk_prob": True}
WIDE = TinyModel("Qwen3Moe", {**SIZES, **EXPERTS})  # columns that all quantized layouts divide
PROMPT = random_prompt(20, VOCAB_SIZE, 3)


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return WIDE.save(tmp_path_factory.mktemp("model") / "moe")


def logprobs(path: Path, **settings: str) -> torch.Tensor:
    """Return the prompt tokens' log-probabilities; then generate a few through the layers for few rows."""
    loaded, config = open_model(directory(path), num_threads=1, **settings)
    entries = read_prompt(loaded, config, PROMPT, chunk=16, num_tokens=4)
    return torch.tensor([entry.logprob for entry in entries])


@pytest.mark.parametrize(("mode", "kind"), [("int8-weight", int8), ("int4-weight", int4)])
def test_experts_are_quantized_and_routers_not(mode: str, kind: object, path: Path) -> None:
    loaded, _ = open_model(directory(path), dtype="bfloat16", quant_mode=mode)
    experts = [ref for ref in loaded.model.linears() if isinstance(ref.owner, Expert)]
    assert len(experts) == 2 * 4 * loaded.config.num_layers
    assert all(ref.layer.gemm is kind for ref in experts)
    assert all(block.router.dtype == torch.bfloat16 for block in loaded.model.blocks if isinstance(block, Moe))
    exact = logprobs(path, dtype="float32")
    error = (logprobs(path, dtype="bfloat16", quant_mode=mode) - exact).abs().mean()
    assert float(error) < (0.1 if mode == "int8-weight" else 0.5) * float(exact.std())


@pytest.mark.parametrize("name", ["qwen2-moe", "qwen3-moe", "mixtral", "deepseek-v3"])
def test_random_weights_need_the_config_alone(name: str, tmp_path: Path) -> None:
    saved = TINY_MODELS[name].save(tmp_path / "saved")
    (tmp_path / "config").mkdir()
    shutil.copy(saved / "config.json", tmp_path / "config")
    loaded, config = open_model(directory(tmp_path / "config"), load_format="dummy")
    assert len(generate(loaded, config, PROMPT, 3)[0]) == 3


def test_experts_of_other_devices_are_refused_on_gpus(path: Path) -> None:
    loaded, _ = open_model(directory(path), quant_mode="int8-weight")
    block = next(block for block in loaded.model.blocks if isinstance(block, Moe))
    with pytest.raises(UnsupportedModelError, match="plain or quantized linear layers"):
        StackedExperts(block)


def test_experts_that_are_quantized_in_part_are_refused_on_gpus_before_weights_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    form = replace(FORMATS["gptq"], kept_plain=("lm_head", "embed_tokens", "experts.1.down_proj"))
    write(form, tmp_path / "m", WIDE)
    monkeypatch.setattr(SafetensorsWeights, "_open", lambda *_: pytest.fail("a weight was read"))
    monkeypatch.setattr(conversion, "linears_of", lambda *_: GpuLinears(torch.device("cpu")))
    with pytest.raises(UnsupportedModelError, match="must all be quantized"):
        load_model(directory(tmp_path / "m"), EngineConfig(str(tmp_path / "m")), torch.device("cuda"))


def test_configs_that_cannot_be_are_refused() -> None:
    with pytest.raises(ConfigError, match="num_experts_per_tok"):
        moe_from_hf({"num_experts": 4, "intermediate_size": 8}, "intermediate_size")
    with pytest.raises(ConfigError, match="5 experts a token of 4"):
        moe_from_hf({"num_local_experts": 4, "num_experts_per_tok": 5, "intermediate_size": 8}, "intermediate_size")


def test_qwen2s_windows_follow_from_older_configs(tmp_path: Path) -> None:
    saved = TINY_MODELS["qwen2-moe-windows"].save(tmp_path / "m")
    config = open_model(directory(saved))[0].config
    assert config.windows == (21, 0, 21, 0)
    edit_config(saved, layer_types=None)
    assert open_model(directory(saved))[0].config == config
    edit_config(saved, max_window_layers=2)
    assert open_model(directory(saved))[0].config.windows == (21, 0, 0, 0)


def test_a_shared_expert_of_another_size_is_refused(tmp_path: Path) -> None:
    tiny = TINY_MODELS["qwen2-moe"]
    saved = replace(tiny, changes={**tiny.changes, "shared_expert_intermediate_size": 40}).save(tmp_path / "m")
    with pytest.raises(UnsupportedModelError, match=r"shared_expert_intermediate_size 40 is no multiple of .* 16"):
        open_model(directory(saved))


def test_a_token_passes_through_the_experts_that_it_chooses(path: Path) -> None:
    config = open_model(directory(path))[0].config
    assert config.moe is not None
    more = replace(config, moe=replace(config.moe, num_experts=400))
    assert num_weights(more) == num_weights(config)
    num_moved = (
        config.num_layers * config.moe.num_experts_per_token * 3 * config.hidden_size * config.moe.intermediate_size
    )
    kept = weight_bytes(config, "bfloat16", "none") - weight_bytes(config, "bfloat16", "mxfp4")
    assert kept == num_moved * (2 - 0.53125)


def test_scores_of_zero_are_shares_of_zero() -> None:
    shares, _ = choose_experts(torch.full((1, 4), -200.0), MoeConfig(4, 2, 0, score="sigmoid"))
    assert shares.tolist() == [[0.0, 0.0]]
