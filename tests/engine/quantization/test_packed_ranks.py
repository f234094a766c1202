"""Ranks and stages of quantized checkpoints: the tokens of the weights that the files stand for, in less memory."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from common.model_files import ModelFiles
from engine.layers.linear import Linear
from engine.layers.weights import Part
from engine.loader.load import load_model
from engine.loader.safetensors import SafetensorsWeights
from engine.quantization import conversion
from engine.quantization.cpu_linears import CpuLinears
from engine.quantization.quantized_rows import Made, QuantizedRows
from kvstore.layout import Shard
from tests.engine.driving import answers, engine_config, prompt_logprobs
from tests.engine.quantization.packed_files import FORMATS, SIZES, TINY, VOCAB_SIZE, write
from tests.engine.threaded_ranks import CPU, GREEDY, NUM_TOKENS, OF_RANKS, open_ranks, open_stages
from tests.engine.tiny_models import DEEPSEEK, TinyModel, reference_answers, rope

pytestmark = pytest.mark.slow
PROMPTS = [[(7 * i + 11 * j) % (VOCAB_SIZE - 8) + 8 for j in range(3 + 9 * i)] for i in range(3)]
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64, "norm_topk_prob": True}
PARTIAL_ROPE = rope("default", partial_rotary_factor=0.75)
MODELS = {
    "plain": TINY,
    "experts": TinyModel("Qwen3Moe", {**SIZES, **EXPERTS, "head_dim": 16}),
    "latents": TinyModel(
        "DeepseekV3",
        {**SIZES, **DEEPSEEK, "num_key_value_heads": 4, "moe_intermediate_size": 64, "q_lora_rank": 64,
         "kv_lora_rank": 64, "n_group": 2, "topk_group": 1},
    ),
    "fused": TinyModel("Phi3", {**SIZES, "num_key_value_heads": 2, **PARTIAL_ROPE}),
    "odd vocabulary": TinyModel("Qwen2", {**TINY.changes, "vocab_size": VOCAB_SIZE + 1}),
}  # fmt: skip
FORMS = {**FORMATS, "packed head": replace(FORMATS["compressed-int4"], kept_plain=("embed_tokens",))}


class ExactLinears(CpuLinears):
    """Makes plain layers, in which nothing is rounded."""

    quantizes_plain = False

    def of_rows(self, rows: QuantizedRows, bias: Tensor | None, is_stacked: bool = False) -> Made | None:
        return Linear(rows.dequantize(torch.float32), bias), "exact"

    def of_plain(self, linear: Linear, quant_mode: str = "int8-weight", is_head: bool = False) -> Linear:
        return linear


@pytest.fixture
def _exact(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(conversion, "can_keep_packed", lambda *_: True)
    monkeypatch.setattr(conversion, "linears_of", lambda dtype, _device: ExactLinears(dtype))


@pytest.mark.usefixtures("_exact")
@pytest.mark.parametrize(
    ("model", "name", "tp", "pp", "settings"),
    [
        ("plain", "gptq-act-order", 2, 1, {}),
        ("plain", "gptq-head", 2, 1, {}),
        ("plain", "awq-one-map-plain", 2, 1, {}),
        ("plain", "compressed-int4-asymmetric", 2, 1, {}),
        ("plain", "compressed-fp8-channel", 2, 1, {}),
        ("plain", "awq", 4, 1, {}),  # two have the same KV head, and half a group of the inputs of `o_proj`
        ("plain", "fp8-blocks", 4, 1, {}),
        ("experts", "gptq-act-order", 2, 1, {}),
        ("experts", "awq", 2, 1, {"expert_parallel": True}),
        ("experts", "fp8-blocks", 2, 1, {"expert_parallel": True, "expert_exchange": "dispatch"}),
        ("experts", "gptq-act-order", 1, 2, {}),
        ("latents", "fp8-blocks", 2, 2, {}),
        ("fused", "gptq-act-order", 2, 1, {}),
        ("fused", "awq", 2, 2, {}),
        ("fused", "fp8-blocks", 1, 2, {}),
        ("fused", "compressed-int4-asymmetric", 4, 1, {}),
        ("odd vocabulary", "packed head", 2, 2, {}),
    ],
)
def test_ranks_and_stages_equal_transformers(
    model: str, name: str, tp: int, pp: int, settings: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reference = write(FORMS[name], tmp_path / "m", MODELS[model])
    for setting, value in settings.items():
        monkeypatch.setitem(OF_RANKS, setting, value)
    parts = open_stages(tmp_path / "m", pp, monkeypatch, tp)
    assert parts.loaded.quant_mode == FORMS[name].label
    assert answers(parts.engine, PROMPTS, GREEDY) == reference_answers(reference, PROMPTS, NUM_TOKENS)


@pytest.mark.parametrize(
    ("name", "of_ranks"), [("gptq-act-order", "3 int4, 9 int4 reordered"), ("compressed-int8", "12 int8")]
)
def test_ranks_have_the_cpus_packed_layers(
    name: str, of_ranks: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """In bfloat16, in which sums over ranks are rounded once more: close, not equal."""
    write(FORMATS[name], tmp_path / "m")
    with caplog.at_level("INFO"):
        found = [
            prompt_logprobs(open_ranks(tmp_path / "m", num_ranks, monkeypatch, dtype="bfloat16").engine, PROMPTS)
            for num_ranks in (1, 2)
        ]
    assert 0 < float((found[0] - found[1]).abs().max()) < 0.1
    held = [record.getMessage() for record in caplog.records if "linear layers are" in record.getMessage()]
    whole, ranks = FORMATS[name].maps, of_ranks  # the engine reads the whole, too
    assert [message.partition("float16, ")[2] for message in held] == [whole, whole, whole, ranks, ranks]


def test_other_ranks_experts_are_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(FORMATS["gptq"], tmp_path / "m", MODELS["experts"])
    config = engine_config(str(tmp_path / "m"), device="cpu", tp=2, expert_parallel=True, num_gpu_blocks=64)
    names: list[str] = []
    told: list[float | None] = []
    read = SafetensorsWeights.read

    def noted(weights: SafetensorsWeights, name: str, part: Part | None = None) -> Tensor:
        names.append(name)
        return read(weights, name, part)

    monkeypatch.setattr(SafetensorsWeights, "read", noted)
    for rank, mine in enumerate(("01", "23")):
        names.clear()
        files = ModelFiles("tiny", "directory", tmp_path / "m")
        load_model(files, config, CPU, Shard(rank, 2), lambda _what, share: told.append(share))
        assert {name.split(".experts.")[1][0] for name in names if ".experts." in name} == set(mine)
        assert told[-1] == 1.0
