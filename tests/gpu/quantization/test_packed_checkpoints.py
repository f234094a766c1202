"""Quantized checkpoints with the linear layers of a GPU, against transformers in float32.

Triton's interpreter multiplies bfloat16 matrices by their bit patterns. So without a GPU, linear layers get one row
at a time, and attention is the CPU's.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from common.model_files import resolve_model
from engine.config import GpuConfig
from engine.gpu.runner import GpuRunner
from engine.layers.linear import plain
from engine.quantization import conversion
from engine.quantization.conversion import linear_of_rows
from engine.quantization.gpu_linears import FP8, W8A8, W8A16, GpuLinears, w4a16
from engine.quantization.quantized_rows import FP8_DTYPE, QuantizedRows
from engine.request import Request, SamplingParams
from engine.request_states import RequestState
from tests.engine.driving import Driver, make_runner, open_model
from tests.engine.quantization.packed_files import FORMATS, SIZES, write
from tests.engine.tiny_models import TinyModel, reference_logits
from tests.gpu.test_engine import ON_GPU, open_gpu, run

DEVICE = torch.device("cuda" if ON_GPU else "cpu")
PROMPTS = [[(7 * i + 3 * j * j) % 97 for j in range(length)] for i, length in enumerate((5, 19, 33))]  # `open_gpu`'s
NUM_TOKENS = 3
LINEARS = {
    "gptq": "4 int4, 1 plain",
    "gptq-act-order": "4 int4 reordered, 1 plain",
    "gptq-head": "5 int4",
    "gptq-8bit": "4 int8 of other groups, 1 plain",
    "awq": "4 int4, 1 plain",
    "awq-one-map-plain": "3 int4, 2 plain",
    "fp8-blocks": "4 e4m3 of blocks, 1 plain",
    "fp8-tensor": "4 e4m3, 1 plain",
    "compressed-fp8-channel": "4 e4m3, 1 plain",
    "compressed-int8": "4 int8, 1 plain",
    "compressed-int8-rows": "4 int8, 1 plain",
    "compressed-int4-asymmetric": "4 int4, 1 plain",
}
SERVED = [*LINEARS] if ON_GPU else ["gptq-act-order", "fp8-tensor"]
ONE_LAYER = TinyModel("Qwen2", {**SIZES, "num_hidden_layers": 1})


def check(results: list[Tensor], exact: Tensor, name: str) -> None:
    """Check the relative error of rows. Rounding only inputs to e4m3 changes rows by up to 0.25, to int8 by 0.04."""
    bound = 0.3 if "e4m3" in LINEARS[name] else 0.06
    assert len(results) == len(exact)
    for result, expected in zip(results, exact, strict=True):
        assert float((result - expected).norm() / expected.norm()) < bound


@pytest.mark.parametrize("name", SERVED)
def test_a_model_is_given_its_linear_layers(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    form = FORMATS[name]
    reference = write(form, tmp_path / "m", ONE_LAYER)
    if not ON_GPU:
        monkeypatch.setattr(conversion, "linears_of", lambda _dtype, device: GpuLinears(device))
    with caplog.at_level("INFO"):
        loaded, config = open_model(resolve_model(str(tmp_path / "m")), device=DEVICE.type, dtype="bfloat16")
    head = "1 plain" if ON_GPU else "1 float16"  # a CPU's output projection, docs/decisions/cpu-batch-invariance.md
    [found] = [line.partition("linear layers are ")[2] for line in caplog.messages if "linear layers are " in line]
    assert sorted(found.split(", ")) == sorted(LINEARS[name].replace("1 plain", head).split(", "))
    if not ON_GPU:
        driver = Driver(make_runner(loaded, config), config)
        prompt = PROMPTS[0][:2]
        request = driver.add(prompt, record_logits=True)
        driver.finish([request], 1, chunk=1)
        result = driver.logits[request.request_id][0].float()
        check([result], reference_logits(reference, prompt)[-1:], name)


@pytest.mark.skipif(not ON_GPU, reason="the interpreter cannot multiply bfloat16 matrices")
@pytest.mark.parametrize("name", LINEARS)
def test_the_gpu_engine_computes_what_the_weights_say(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prompts and decode steps in graphs, one request and three at once."""
    reference = write(FORMATS[name], tmp_path / "m", ONE_LAYER)
    made, runner = open_gpu(
        tmp_path / "m", monkeypatch, GpuConfig(), dtype="bfloat16", quant_mode="auto", prefix_cache=False
    )
    params = SamplingParams(max_tokens=NUM_TOKENS, temperature=0.0, ignore_eos=True)
    for num_requests in (1, 3):
        recorded = []
        for prompt in PROMPTS[:num_requests]:
            request = made.add_request(prompt, params)
            recorded.append((request, record_logits(runner, request)))
        run(made)
        for request, rows in recorded:
            tokens = request.prompt_token_ids + request.output_token_ids
            check(rows, reference_logits(reference, tokens)[request.num_prompt_tokens - 1 : -1], name)


def record_logits(runner: GpuRunner, request: Request) -> list[Tensor]:
    """Return a list that is filled with the logits of each of the request's output tokens."""
    rows: list[Tensor] = []

    def record(_request: RequestState, row: Tensor) -> None:
        rows.append(row.float().cpu().clone())

    runner.hooks[request.request_id] = record
    return rows


def rows_of(
    values: Tensor, group_size: int, quantizes_inputs: bool = False, has_offsets: bool = False
) -> QuantizedRows:
    """Make rows of values (n, k), with random scales."""
    scales = torch.rand(values.shape[0], values.shape[1] // group_size) * 0.1 + 0.01
    offsets = scales * torch.randint(-8, 8, scales.shape) if has_offsets else None
    offsets = None if offsets is None else offsets.to(DEVICE)
    return QuantizedRows(values.to(DEVICE), scales.to(DEVICE), offsets, group_size, None, quantizes_inputs)


def int4_values(n: int, k: int) -> Tensor:
    return torch.randint(0, 16, (n, k)).to(torch.uint8)


def int8_values(n: int, k: int) -> Tensor:
    return torch.randint(-127, 128, (n, k)).to(torch.int8)


CASES: dict[str, tuple[Callable[[], QuantizedRows], object, str]] = {
    "four bits": (lambda: rows_of(int4_values(48, 128), 32, has_offsets=True), w4a16, "int4"),
    "four bits, one group": (lambda: rows_of(int4_values(48, 96), 96), w4a16, "int4"),
    "groups of four": (lambda: rows_of(int4_values(48, 64), 4), W8A16, "int8 of other groups"),
    "int8": (lambda: rows_of(int8_values(48, 64), 64), W8A16, "int8"),
    "int8 inputs": (lambda: rows_of(int8_values(48, 64), 64, quantizes_inputs=True), W8A8, "int8"),
    "int8 in groups": (lambda: rows_of(int8_values(48, 64), 32), W8A16, "int8 of other groups"),
    "int8 with offsets": (lambda: rows_of(int8_values(48, 64), 64, has_offsets=True), W8A16, "int8 of other groups"),
    "e4m3": (lambda: rows_of(torch.randn(48, 64).to(FP8_DTYPE), 64, quantizes_inputs=True), FP8, "e4m3"),
    "e4m3 in blocks": (
        lambda: rows_of(torch.randn(48, 64).to(FP8_DTYPE), 32, quantizes_inputs=True),
        FP8,
        "e4m3 of blocks",
    ),
    "e4m3, plain inputs": (lambda: rows_of(torch.randn(48, 64).to(FP8_DTYPE), 64), W8A16, "int8 of e4m3"),
    "narrow": (lambda: rows_of(int8_values(48, 24), 24), plain, "dequantized"),
}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("has_bias", [False, True])
def test_linear_layers_multiply_by_their_rows(name: str, has_bias: bool) -> None:
    torch.manual_seed(3)
    make_rows, kind, words = CASES[name]
    rows = make_rows()
    bias = torch.randn(48, device=DEVICE).bfloat16() if has_bias else None
    linear, found = linear_of_rows([rows], bias, torch.bfloat16, GpuLinears(DEVICE))
    assert linear.gemm is kind
    assert found == words
    weight = rows.dequantize(torch.float32)
    for num_rows in (1, 3, 40) if ON_GPU else (1,):
        x = torch.randn(num_rows, weight.shape[1], device=DEVICE).bfloat16()
        exact = torch.nn.functional.linear(x.float(), weight, None if bias is None else bias.float())
        assert float((linear(x).float() - exact).norm() / exact.norm()) < (0.06 if "e4m3" in words else 0.02)
