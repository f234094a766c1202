"""Experts of 4 bits, and of quantized checkpoints, give the tokens of their dequantized weights on the GPU engine."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from engine.config import GpuConfig
from engine.gpu.runner import GpuRunner
from engine.layers.block import Block
from engine.layers.linear import Linear
from engine.models.model import Model
from engine.moe.moe import Moe
from engine.quantization import conversion
from engine.quantization.conversion import QuantizedConversion, linear_of_rows
from engine.quantization.gpu_linears import GpuLinears, dequantized
from engine.quantization.quantized_rows import FP8_DTYPE, Made, QuantizedRows
from tests.engine.quantization.packed_files import FORMATS, SIZES, Format, pack_fp8, write
from tests.engine.quantization.published import FAMILIES, PUBLISHED
from tests.engine.tiny_models import TinyModel
from tests.gpu.kv.test_kv_groups import GPT_OSS
from tests.gpu.models import save_family, use_small_tiles
from tests.gpu.quantization.test_packed_checkpoints import DEVICE, int4_values, int8_values, rows_of
from tests.gpu.test_engine import ON_GPU, generate, greedy, open_gpu, reference

EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64, "norm_topk_prob": True}
MOE = TinyModel("Qwen3Moe", {**SIZES, **EXPERTS, "num_hidden_layers": 1, "head_dim": 16})
ATTENTION = ("lm_head", "embed_tokens", "q_proj", "k_proj", "v_proj", "o_proj")  # plain: there x would be rounded
BLOCKS = {**FORMATS["fp8-blocks"].config, "weight_block_size": [32, 32]}
CHECKPOINTS: dict[str, Format] = {
    "gptq": FORMATS["gptq"],
    "awq": FORMATS["awq"],
    "gptq, act order": FORMATS["gptq-act-order"],
    "fp8 in blocks": replace(
        FORMATS["fp8-blocks"], kept_plain=ATTENTION, config=BLOCKS,
        pack=lambda weight: pack_fp8(weight, (32, 32), "weight_scale_inv"),
    ),
    "fp8": replace(FORMATS["compressed-fp8-channel"], kept_plain=ATTENTION),
}  # fmt: skip
SERVED = [*CHECKPOINTS] if ON_GPU else ["fp8 in blocks"]
# Alone a GEMV of one row (plain attention) or of pairs, together tiles; prompts of more than 16 tokens are sorted.
PROMPTS = [[(7 * i + 3 * j * j) % 97 for j in range(length)] for i, length in enumerate((2, 18))]
PARAMS = [*greedy(2)[:1], *greedy(3)[:1]]


def plain(layer: Linear) -> Linear:
    return layer if layer.is_plain else Linear(dequantized(layer, torch.float32), layer.bias)


class ExpertsConversion(QuantizedConversion):
    """`int4-weight` on a GPU, only for experts, so that a single row uses its own GEMVs."""

    def convert(self, block: Block) -> None:
        if isinstance(block, Moe):
            super().convert(block)

    def finish(self, model: Model) -> None:
        """Leave the output projection unchanged."""


class DequantizingLinears(GpuLinears):
    """Makes the layers of `GpuLinears`, dequantized."""

    def of_rows(self, rows: QuantizedRows, bias: Tensor | None, is_stacked: bool = False) -> Made | None:
        made = super().of_rows(rows, bias, is_stacked)
        return None if made is None else (plain(made[0]), made[1])

    def of_plain(self, linear: Linear, quant_mode: str = "int8-weight", is_head: bool = False) -> Linear:
        return plain(super().of_plain(linear, quant_mode, is_head))


def experts_of(runner: GpuRunner) -> list[Moe]:
    return [block for block in runner._forward._forwards._model.blocks if isinstance(block, Moe)]


def test_tokens_of_int4_experts_equal_those_of_their_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    use_small_tiles(monkeypatch, 2)
    model = MOE.save(tmp_path / "m")
    monkeypatch.setattr(conversion, "resolve_quant_mode", lambda *_: "int4-weight")
    monkeypatch.setattr(conversion, "QuantizedConversion", ExpertsConversion)
    monkeypatch.setattr(conversion, "linears_of", lambda _dtype, device: DequantizingLinears(device))
    expected = generate(reference(model), PARAMS, PROMPTS)
    monkeypatch.setattr(conversion, "linears_of", lambda _dtype, device: GpuLinears(device))
    made, runner = open_gpu(model, monkeypatch, GpuConfig())
    assert generate(made, PARAMS, PROMPTS) == expected
    (experts,) = (block.stacked for block in experts_of(runner))
    assert experts.gate_up.itemsize == experts.down.itemsize == 0.5


@pytest.mark.parametrize("name", SERVED)
def test_tokens_of_a_checkpoint_equal_those_of_its_weights(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    use_small_tiles(monkeypatch, 2)
    write(CHECKPOINTS[name], tmp_path / "m", MOE)
    monkeypatch.setattr(conversion, "can_keep_packed", lambda *_: True)  # in float32, where nothing is rounded
    monkeypatch.setattr(conversion, "linears_of", lambda _dtype, device: DequantizingLinears(device))
    expected = generate(reference(tmp_path / "m"), PARAMS, PROMPTS)
    monkeypatch.setattr(conversion, "linears_of", lambda _dtype, device: GpuLinears(device))
    made, _ = open_gpu(tmp_path / "m", monkeypatch, GpuConfig(), quant_mode="auto")
    assert generate(made, PARAMS, PROMPTS) == expected


def save_mxfp4(folder: Path, inner: int = 64) -> Path:
    """Save a tiny gpt-oss whose experts are random MXFP4 blocks."""
    save_family(folder, {**GPT_OSS, "intermediate_size": inner})
    stored, raw = load_file(folder / "model.safetensors"), json.loads((folder / "config.json").read_text())
    for name in [name for name in stored if name.endswith(("gate_up_proj", "down_proj"))]:
        num_experts, columns, rows = stored.pop(name).shape
        blocks = torch.randint(0, 256, (num_experts, rows, columns // 32, 16), dtype=torch.uint8)
        exponents = torch.randint(122, 126, blocks.shape[:3], dtype=torch.uint8)
        stored |= {f"{name}_blocks": blocks, f"{name}_scales": exponents}
    save_file(stored, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps({**raw, "quantization_config": {"quant_method": "mxfp4"}}))
    return folder


def test_tokens_of_mxfp4_equal_those_of_its_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of gate and up alternate; experts have biases and a clamped gate."""
    use_small_tiles(monkeypatch, 2)
    torch.manual_seed(0)
    model = save_mxfp4(tmp_path)
    expected = generate(reference(model), PARAMS, PROMPTS)
    monkeypatch.setattr(conversion, "can_keep_on_gpu", lambda *_: True)  # in float32, where nothing is rounded
    made, runner = open_gpu(model, monkeypatch, GpuConfig(), quant_mode="auto")
    assert generate(made, PARAMS, PROMPTS) == expected
    assert {block.stacked.down.itemsize for block in experts_of(runner)} == {0.5}


def test_random_weights_of_an_mxfp4_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = save_mxfp4(tmp_path)
    (model / "model.safetensors").unlink()
    plain, _ = open_gpu(model, monkeypatch, GpuConfig(), quant_mode="none", load_format="dummy")
    expected = generate(plain, PARAMS, PROMPTS)
    monkeypatch.setattr(conversion, "can_keep_on_gpu", lambda *_: True)
    made, runner = open_gpu(model, monkeypatch, GpuConfig(), quant_mode="auto", load_format="dummy")
    assert {block.stacked.down.itemsize for block in experts_of(runner)} == {0.5}
    assert generate(made, PARAMS, PROMPTS) == expected


def test_tokens_of_experts_that_lie_apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """GPTQModel stores gpt-oss's experts separately; dequantized, they are stacked like plain ones."""
    use_small_tiles(monkeypatch, 2)
    tiny = FAMILIES["gpt-oss"]
    PUBLISHED["gptqmodel"].write(tmp_path / "m", replace(tiny, changes={**tiny.changes, "num_hidden_layers": 1}))
    expected = generate(reference(tmp_path / "m"), PARAMS, PROMPTS)
    made, runner = open_gpu(tmp_path / "m", monkeypatch, GpuConfig(), quant_mode="auto")
    assert generate(made, PARAMS, PROMPTS) == expected
    assert {block.stacked.down.itemsize for block in experts_of(runner)} == {4}


def fp8_values(n: int, k: int) -> Tensor:
    return torch.randn(n, k).to(FP8_DTYPE)


CASES: dict[str, tuple[Callable[[], QuantizedRows], str]] = {
    "four bits": (lambda: rows_of(int4_values(48, 128), 32, has_offsets=True), "int4"),
    "four bits, one group": (lambda: rows_of(int4_values(48, 192), 192), "int4"),
    "narrow groups": (lambda: rows_of(int4_values(48, 128), 16), "int8 of other groups or order"),
    "narrow rows": (lambda: rows_of(int4_values(48, 96), 32), "int8 of other groups or order"),
    "int8": (lambda: rows_of(int8_values(48, 64), 64), "int8"),
    "int8 in groups": (lambda: rows_of(int8_values(48, 64), 32), "int8 in groups"),
    "int8 with offsets": (
        lambda: rows_of(int8_values(48, 64), 64, has_offsets=True),
        "int8 of other groups or order",
    ),
    "e4m3": (lambda: rows_of(fp8_values(48, 64), 64), "e4m3"),
    "e4m3 in blocks": (lambda: rows_of(fp8_values(48, 96), 48, quantizes_inputs=True), "e4m3 in groups"),
    "act order": (
        lambda: replace(rows_of(int4_values(48, 128), 64), order=torch.randperm(128, device=DEVICE)),
        "int8 of other groups or order",
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_experts_keep_what_their_kernels_take(name: str) -> None:
    make_rows, kind = CASES[name]
    rows = make_rows()
    made, found = linear_of_rows([rows], None, torch.float32, GpuLinears(DEVICE), is_expert=True)
    assert found == kind
    exact = rows.dequantize(torch.float32)
    bound = 1e-2 if "int" in kind else 1e-6  # int4's scales are bfloat16
    assert float((dequantized(made, torch.float32) - exact).norm() / exact.norm()) < bound
