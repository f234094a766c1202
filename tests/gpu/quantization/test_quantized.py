"""Quantized weights in the GPU engine: the same tokens as the reference GEMMs in the plain engine."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

import engine.assembly
from engine.assembly import assemble
from engine.config import EngineConfig, GpuConfig
from engine.engine import Engine
from engine.gpu.runner import GpuRunner
from engine.layers.linear import Linear
from engine.quantization import conversion
from engine.quantization.cpu_linears import CpuLinears
from engine.quantization.gpu_linears import FP8, W8A8, W8A16, EightBit, GpuLinears, scales_of, w4a16_layer
from engine.request import SamplingParams
from kernels.gpu.few_rows.split_k import SplitKWorkspace
from kernels.gpu.quantization.quantized_tuning import MAX_TWO_PLANE_ROWS
from kernels.quantization.quantized_gemm import (
    FP8_DTYPE,
    quantize_rows_fp8,
    quantize_rows_int8,
    quantized_linear,
    w8a16_linear,
)
from kernels.quantization.w4a16_gemm import pack_w4

ON_GPU = torch.cuda.is_available()
PROMPTS = [[(7 * i + 3 * j * j) % 97 for j in range(length)] for i, length in enumerate((5, 12))]
REFERENCES: dict[str, tuple[Callable[[Tensor], tuple[Tensor, Tensor]], Callable[..., Tensor]]] = {
    "fp8": (quantize_rows_fp8, quantized_linear),
    "w8a8": (quantize_rows_int8, quantized_linear),
    "int8-weight": (quantize_rows_int8, w8a16_linear),
}


class ReferenceLinears(CpuLinears):
    """Plain torch for every linear layer."""

    def of_plain(self, linear: Linear, quant_mode: str = "int8-weight", is_head: bool = False) -> Linear:
        quantize, gemm = REFERENCES["w8a8" if is_head and quant_mode == "fp8" else quant_mode]
        weight, scales = quantize(linear.weight)
        return Linear(weight, linear.bias, gemm=lambda made, x: gemm(x, made.weight, scales, made.bias))


def generate(made: Engine, prompts: list[list[int]]) -> list[list[int]]:
    params = SamplingParams(max_tokens=3, temperature=0.0, ignore_eos=True)
    requests = [made.add_request(prompt, params) for prompt in prompts]
    while made.has_work():
        made.step()
    return [request.output_token_ids for request in requests]


def config_of(model: Path, device: str) -> EngineConfig:
    return EngineConfig(
        str(model), device=device, dtype="float32", quant_mode="none", num_gpu_blocks=64, block_size=16,
        max_num_seqs=4, max_num_batched_tokens=32, max_model_len=96,
    )  # fmt: skip


@pytest.mark.parametrize("mode", REFERENCES)
@pytest.mark.parametrize("uses_graphs", [True, False] if ON_GPU else [False])
def test_tokens_equal_those_of_the_reference(
    mode: str, uses_graphs: bool, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prompts, several rows and single rows; in float32, where rounding alone decides."""
    monkeypatch.setattr(conversion, "resolve_quant_mode", lambda *_: mode)
    monkeypatch.setattr(conversion, "linears_of", lambda dtype, _device: ReferenceLinears(dtype))
    expected = generate(assemble(config_of(model, "cpu")).engine, PROMPTS)
    if not ON_GPU:
        monkeypatch.setattr(engine.assembly, "_make_runner", GpuRunner)
    monkeypatch.setattr(conversion, "linears_of", lambda _dtype, device: GpuLinears(device))
    gpu = GpuConfig(overlap=False, use_cuda_graph=uses_graphs)
    parts = assemble(config_of(model, "cuda" if ON_GPU else "cpu"), gpu=gpu)
    assert parts.loaded.quant_mode == mode
    assert generate(parts.engine, PROMPTS) == expected
    assert generate(parts.engine, PROMPTS[1:2]) == expected[1:2]


@pytest.mark.parametrize("kind", [FP8, W8A8, W8A16])
def test_layers_are_made_of_stored_values(kind: EightBit) -> None:
    device = torch.device("cuda" if ON_GPU else "cpu")
    weight = torch.randn(32, 64, device=device)
    values = weight.mul(8).to(kind.dtype)
    workspace = SplitKWorkspace(device)
    per_tensor = kind.linear(values, torch.tensor(0.125, device=device), None, workspace)
    per_row = kind.linear(values, torch.full((32, 1), 0.125, device=device), None, workspace)
    x = torch.randn(3, 64, device=device)
    assert torch.equal(per_tensor(x), per_row(x))
    with pytest.raises(ValueError, match="multiple of 16"):
        kind.linear(values[:, :40], scales_of(per_row), None, workspace)
    with pytest.raises(ValueError, match="needed"):
        kind.linear(
            values.to(torch.int8 if kind.dtype == FP8_DTYPE else FP8_DTYPE), scales_of(per_row), None, workspace
        )


def test_many_rows_of_16_bits_go_through_the_plain_weight() -> None:
    device = torch.device("cuda" if ON_GPU else "cpu")
    weight, x = torch.randn(32, 64, device=device), torch.randn(MAX_TWO_PLANE_ROWS + 1, 64, device=device)
    linear = W8A16.of(Linear(weight), SplitKWorkspace(device))
    torch.testing.assert_close(linear(x), w8a16_linear(x, linear.weight, scales_of(linear)), rtol=1e-4, atol=1e-4)


def test_int4_layer() -> None:
    device = torch.device("cuda" if ON_GPU else "cpu")
    values = torch.randint(0, 16, (32, 64), dtype=torch.uint8, device=device)
    scales, zeros = torch.rand(2, 32, 2, device=device)
    linear = w4a16_layer(pack_w4(values, scales, zeros), torch.ones(32, device=device), SplitKWorkspace(device))
    spread = [part.bfloat16().float().repeat_interleave(32, 1) for part in (scales, zeros)]
    weight = (values.float() - 8) * spread[0] + spread[1]
    x = torch.randn(3, 64, device=device)
    torch.testing.assert_close(linear(x), x @ weight.T + 1, rtol=1e-4, atol=1e-4)
