"""Writes down every kernel launch of the engine's steps, compiled for sm_90, and compares two such files.

    python -m tests.compile.launches before.json
    python -m tests.compile.launches after.json --compare before.json

A change of kernels that leaves PTX, grids and arguments as they were needs no measurement.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import re
from collections import Counter
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path
from typing import Any

os.environ["TRITON_DISABLE_LINE_INFO"] = "1"  # PTX names lines of the source

import pytest
import torch
from torch import Tensor
from triton.runtime.jit import JITFunction

from engine.few_rows import split_k
from engine.gpu.ops import plain
from engine.kv.memory import kv_layout
from engine.layers.linear import Linear
from engine.quantization.gpu_linears import FP8, W8A8, W8A16, w4a16_layer
from kernels.gpu.few_rows.split_k import SplitKWorkspace
from kernels.quantization.w4a16_gemm import PackedW4
from tests.compile import hopper
from tests.compile.test_compiles_for_hopper import META, decode_inputs, forward_over, ints, model_of, prompt_inputs

BFLOAT16, E4M3 = torch.bfloat16, torch.float8_e4m3fn
MODELS = [
    *(("qwen2.5-7b", mode, BFLOAT16) for mode in ("none", "fp8", "w8a8", "int8-weight", "int4-weight")),
    *(("qwen3-0.6b", mode, BFLOAT16) for mode in ("none", "fp8", "w8a8", "int8-weight")),
    *(("qwen3-30b-a3b", mode, BFLOAT16) for mode in ("none", "fp8", "int4-weight")),
    ("qwen3-8b", "none", BFLOAT16), ("llama3.1-8b", "none", E4M3), ("llama3.1-8b", "fp8", E4M3),
    ("deepseek-v2-lite", "none", BFLOAT16),
    ("gemma3-4b", "none", BFLOAT16), ("gpt-oss-20b", "none", BFLOAT16), ("gpt-oss-20b", "fp8", BFLOAT16),
]  # fmt: skip
NUM_LAYERS = {"deepseek-v2-lite": 2, "gemma3-4b": 6, "gpt-oss-20b": 2}  # otherwise one: each kind of block occurs
ROWS = (1, 2, 8, 9, 16, 17, 32, 40, 48, 64, 80, 128, 200, 256)
PROMPTS = ([16], [100], [256], [300], [8192], [100, 900, 40])
ODD_SHAPES = ((1000, 1040), (9000, 1040), (4608, 3584))
W4_SHAPES = ((1000, 1280), (37888, 3584), (3584, 18944))
LAYER_ROWS = (1, 3, 8, 12, 16, 17, 30, 64, 100, 128, 200, 600)


@dataclass
class Launch:
    """ptx: of the variant, without names. arguments: types, shapes and strides of tensors, and numbers."""

    kernel: str
    grid: list[int]
    ptx: str
    registers: int
    spilled: int
    shared_bytes: int
    arguments: str


class Recorder:
    """Launches of each case, in order."""

    def __init__(self) -> None:
        self.cases: dict[str, list[Launch]] = {}
        self.case = ""
        self._seen: dict[str, tuple[str, hopper.Compiled]] = {}

    def install(self, patch: pytest.MonkeyPatch) -> None:
        hopper.install(patch)
        recorder = self

        def at_grid(kernel: Any, grid: tuple[int, ...]) -> Any:
            def compile_only(*args: Any, **constants: Any) -> None:
                compiled = kernel.run(*args, grid=grid, warmup=True, **constants)
                if compiled.hash not in recorder._seen:
                    text = compiled.asm["ptx"].replace(compiled.metadata.name, "kernel")
                    text = re.sub(r"\s*//.*|^\s*\.(loc|file).*", "", text, flags=re.MULTILINE)
                    digest = hashlib.sha256(text.encode()).hexdigest()[:16]
                    recorder._seen[compiled.hash] = digest, hopper.resources(compiled)
                ptx, used = recorder._seen[compiled.hash]
                launch = Launch(
                    used.name, list(grid), ptx, used.registers, used.spilled, used.shared_bytes,
                    " ".join(described(arg) for arg in args if arg is not None),
                )  # fmt: skip
                recorder.cases.setdefault(recorder.case, []).append(launch)

            return compile_only

        patch.setattr(JITFunction, "__getitem__", at_grid)


def described(value: Any) -> str:
    return f"{value.dtype}{list(value.shape)}{list(value.stride())}" if isinstance(value, Tensor) else repr(value)


def record_steps(recorder: Recorder) -> None:
    for name, mode, kv_dtype in MODELS:
        recorder.case = f"{name} {mode} is made"
        model = model_of(name, mode, NUM_LAYERS.get(name, 1))
        forward, num_groups = forward_over(model, kv_dtype), len(kv_layout(model.config, kv_dtype).groups)
        for rows in ROWS:
            recorder.case = f"{name} {mode}, {rows} rows"
            forward.logits(forward.hidden(decode_inputs(rows, num_groups)))
        for lengths in PROMPTS:
            recorder.case = f"{name} {mode}, prompts {lengths}"
            forward.hidden(prompt_inputs(forward, lengths, num_groups))


def record_layers(recorder: Recorder) -> None:
    """Record single linear layers: shapes that are not multiples of tiles, biases, groups."""
    workspace = SplitKWorkspace(META)
    for (n, k), has_bias, rows in product(ODD_SHAPES, (False, True), LAYER_ROWS):
        recorder.case = f"{rows} rows, {n} x {k}, bias {has_bias}"
        x, bias = tensor(rows, k), tensor(n) if has_bias else None
        layer = Linear(tensor(n, k), bias)
        plain.gemm(layer, rows, workspace)(x)
        plain.gated_gemm(Linear(tensor(2 * n, k)), rows, workspace)(x)
        if split_k.config_of(layer, rows) is not None:
            split_k.gemm(layer, rows)(x)
        for kind in (W8A8, W8A16, FP8):
            kind.linear(tensor(n, k, dtype=kind.dtype), tensor(n, dtype=torch.float32), bias, workspace)(x)
    for (n, k), group, rows in product(W4_SHAPES, (32, 64, 128), LAYER_ROWS):
        recorder.case = f"int4, {rows} rows, {n} x {k}, groups of {group}"
        packed = PackedW4(ints(n, k // 4, dtype=torch.int16), tensor(n, k // group, 2), group)
        w4a16_layer(packed, None, workspace)(tensor(rows, k))


def tensor(*shape: int, dtype: torch.dtype = BFLOAT16) -> Tensor:
    return torch.empty(shape, dtype=dtype, device=META)


def compare(before: dict[str, list[dict[str, Any]]], after: dict[str, list[dict[str, Any]]]) -> None:
    """Print the differences, once for each pair of variants."""
    counts: Counter[str] = Counter()
    for case in before.keys() & after.keys():
        if len(before[case]) != len(after[case]):
            counts[f"{case}: other launches"] += 1
            continue
        for old, new in zip(before[case], after[case], strict=True):
            names = {name for name in old if old[name] != new[name]} - {"kernel"}
            change = ", ".join(f"{name} {old[name]} -> {new[name]}" for name in sorted(names))
            counts[f"{new['kernel']}: {change}" if names else "equal"] += 1
    print(f"{counts.pop('equal', 0)} launches are equal; cases in one file only: {len(before.keys() ^ after.keys())}")
    for text, count in counts.most_common():
        print(f"{count} x {text}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path)
    parser.add_argument("--compare", type=Path, help="a file from another tree")
    options = parser.parse_args()
    recorder = Recorder()
    with pytest.MonkeyPatch.context() as patch:
        recorder.install(patch)
        record_steps(recorder)
        record_layers(recorder)
    cases = {case: [asdict(launch) for launch in found] for case, found in recorder.cases.items()}
    options.file.write_text(json.dumps(cases))
    if options.compare:
        compare(json.loads(options.compare.read_text()), cases)


if __name__ == "__main__":
    main()
