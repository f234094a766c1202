"""Served steps launch no kernel variant that the warm-up has not launched: streams would wait for its compilation.

Launches are bound as for an H200, which determines their variants, but not executed. Graphs are replaced by the steps
that would be captured; launches that they replay when a step is served count as launched before.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from triton.runtime.jit import JITFunction, compute_cache_key

import engine.assembly
import engine.cpu_gemms.gemms
import engine.gpu.attention.grouped
import kernels.gpu.attention.kv_splits
import kernels.gpu.attention.prompt_tiles
import kernels.gpu.elementwise.rope
from engine.assembly import assemble
from engine.config import EngineConfig, GpuConfig
from engine.gpu.attention.backend import PagedAttention, PrefillAttention
from engine.gpu.runner import GpuRunner
from engine.gpu.steps.decode_steps import DecodeSteps
from engine.gpu.steps.rows import bucket_sizes
from engine.prefill_backends.fa3 import FlashAttention3, Operator
from engine.prompt_graphs.graphs import PromptGraphs, prompt_step
from engine.quantization import conversion
from engine.quantization.gpu_linears import GpuLinears
from engine.request import SamplingParams
from engine.trial_plans import WITH_ALL, WITH_RULES, trial_plan
from kernels.gpu.attention.decode_plan import tuned_rows
from tests.compile import hopper
from tests.gpu.kv.test_kv_groups import GEMMA3, GPT_OSS
from tests.gpu.mla.test_latents import V2
from tests.gpu.models import save_family, save_tiny_model

BLOCK_SIZE, MAX_TOKENS, MAX_ROWS = 64, 2048, 64
NUM_BLOCKS = 400
NUM_STEPS = 30
PARAMS = (
    SamplingParams(max_tokens=1, temperature=0.0, seed=0),
    SamplingParams(max_tokens=1, temperature=0.8, top_k=5, top_p=0.9, min_p=0.1, seed=3, logprobs=2),
    SamplingParams(max_tokens=1, temperature=0.0, seed=0, prompt_logprobs=2),
    SamplingParams(max_tokens=1, temperature=0.7, seed=1, repetition_penalty=1.1, bad_words=((3, 4), (5,))),
    WITH_RULES,
    WITH_ALL,
)
WIDE = {"hidden_size": 256, "intermediate_size": 512, "max_position_embeddings": 1 << 15}
FAMILIES: dict[str, dict[str, Any]] = {
    "mla": {
        **V2, **WIDE, "kv_lora_rank": 64, "qk_nope_head_dim": 32, "v_head_dim": 32, "moe_intermediate_size": 64,
        "n_routed_experts": 8, "num_hidden_layers": 3,
    },
    "gemma": {**GEMMA3, **WIDE, "head_dim": 256, "sliding_window": 512},
    "gpt-oss": {**GPT_OSS, **WIDE, "intermediate_size": 256, "head_dim": 64, "sliding_window": 128},
}  # fmt: skip


class Launches:
    """Records the variants launched before `are_new` was set, and those launched only since."""

    def __init__(self) -> None:
        self.before: set[tuple[str, str]] = set()
        self.late: set[tuple[str, str]] = set()
        self.are_new = False

    def add(self, kernel: Any, args: Any, constants: dict[str, Any]) -> None:
        _, keys, _, _, binder = kernel.device_caches[hopper.DEVICE_INDEX]
        _, specialization, options = binder(*args, **constants, debug=False, instrumentation_mode="")
        variant = kernel.__name__, compute_cache_key(keys, specialization, options)
        if not self.are_new:
            self.before.add(variant)
        elif variant not in self.before:
            self.late.add(variant)

    def replayed(self, run: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap `run`, whose launches are in a graph, so that they count as launched before."""

        @wraps(run)
        def quietly(*args: Any, **options: Any) -> Any:
            self.are_new, were_new = False, self.are_new
            try:
                return run(*args, **options)
            finally:
                self.are_new = were_new

        return quietly


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> Launches:
    found = Launches()
    hopper.install(monkeypatch)
    new_tensor = torch.empty

    def at_grid(kernel: Any, grid: Any) -> Any:
        return lambda *args, **constants: found.add(kernel, args, constants)

    def filled(*shape: Any, **options: Any) -> Tensor:
        made = new_tensor(*shape, **options)
        return made if made.is_meta else made.zero_()  # no kernel writes to it, but its values must be in range

    monkeypatch.setattr(JITFunction, "__getitem__", at_grid)
    monkeypatch.setattr(torch, "empty", filled)
    monkeypatch.setattr(
        torch, "empty_like", lambda x, **options: filled(x.shape, **{"dtype": x.dtype, "device": x.device, **options})
    )
    # These are not our kernels, take up to a tenth of a second each on a CPU, and mostly get zeros.
    monkeypatch.setattr(
        torch, "_scaled_mm", lambda x, w, *_, out_dtype, **__: filled(x.shape[0], w.shape[1], dtype=out_dtype)
    )
    monkeypatch.setattr(
        torch.nn.functional, "linear", lambda x, w, *_: filled(*x.shape[:-1], w.shape[0], dtype=x.dtype)
    )
    monkeypatch.setattr(engine.assembly, "_make_runner", GpuRunner)
    monkeypatch.setattr(engine.cpu_gemms.gemms, "fits_half", lambda weight: False)
    # So that tiny steps are on both sides of the thresholds for large ones.
    monkeypatch.setattr(kernels.gpu.elementwise.rope, "STREAMED_BYTES", 1 << 20)
    monkeypatch.setattr(kernels.gpu.attention.prompt_tiles, "WAVES", 1)
    monkeypatch.setattr(kernels.gpu.attention.kv_splits, "COMBINE_PROGRAMS", 104)
    return found


def open_runner(
    folder: Path, quant_mode: str, backend: str, monkeypatch: pytest.MonkeyPatch, **changes: Any
) -> GpuRunner:
    """Open a runner, warmed up except for graphs. folder: of the model. changes: of the settings."""

    def open_attention(
        wanted: str, pool: Tensor, num_heads: int, dtype: torch.dtype, max_tokens: int, needs: str
    ) -> PrefillAttention:
        if backend == "triton":
            return PagedAttention(num_heads, pool.shape[3])
        operator = Operator(lambda *_, out, **options: out, follows_tables=backend == "fa3 pages")
        return FlashAttention3(operator, pool, num_heads, dtype)

    monkeypatch.setattr(engine.gpu.attention.grouped, "open_attention", open_attention)
    monkeypatch.setattr(conversion, "resolve_quant_mode", lambda *_: quant_mode)
    monkeypatch.setattr(conversion, "linears_of", lambda _dtype, device: GpuLinears(device))
    settings = EngineConfig(
        str(folder), device="cpu", dtype="bfloat16", quant_mode="none", num_gpu_blocks=NUM_BLOCKS,
        block_size=BLOCK_SIZE, max_num_batched_tokens=MAX_TOKENS,
        **{"max_num_seqs": MAX_ROWS, "max_model_len": 1 << 14, **changes},
    )  # fmt: skip
    runner = assemble(settings, gpu=GpuConfig(overlap=False)).runner
    assert isinstance(runner, GpuRunner)
    return runner


def save_model(folder: Path, **shape: int) -> None:
    save_tiny_model(folder, head_dim=64, **shape)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "max_position_embeddings": 1 << 15}))


def stand_in_for_capture(runner: GpuRunner) -> None:
    """Run the steps that would be captured."""
    decodes = runner._decodes
    for num_rows in runner._rows.buckets:
        for steps in (decodes, getattr(decodes, "_without_drafts", decodes)):
            steps._compute(num_rows)
    graphs = runner.prompt_graphs = runner.open_prompt_graphs(captures=False)
    for shape in graphs.shapes:
        prompt_step(*graphs._parts, graphs._inputs(graphs._buffer, *shape))


@pytest.mark.parametrize("max_rows", [20, 64, 512])
def test_rows_have_the_settings_of_the_graph_that_holds_them(max_rows: int) -> None:
    buckets = bucket_sizes(max_rows)
    for num_rows in range(1, max_rows + 1):
        assert tuned_rows(num_rows) == tuned_rows(next(size for size in buckets if size >= num_rows))


def some_step(draw: random.Random, max_length: int) -> list[tuple[int, int]]:
    """Return (start, tokens) of decode rows and a few prompt chunks, of any lengths and contexts."""
    num_decodes = draw.choice([0, 0, 1, 3, 16, 26, 33, draw.randrange(MAX_ROWS - 1)])
    shares = [(min(draw.choice([5, 100, 3000]), max_length - 1), 1) for _ in range(num_decodes)]
    left = MAX_TOKENS - num_decodes
    for _ in range(min(draw.choice([1, 1, 2, 9]), MAX_ROWS - num_decodes)):
        start = min(draw.choice([0, 0, 64, 9000, 12000]), max_length - 64)
        num_tokens = min(left, max_length - start, int(2 ** draw.uniform(0, 11)))
        shares.append((start, num_tokens))
        left -= num_tokens
    return [share for share in shares if share[1]]


def serve(runner: GpuRunner, launches: Launches, max_length: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Check that random steps need no other variants."""
    stand_in_for_capture(runner)
    num_warmed = len(launches.before)
    monkeypatch.setattr(DecodeSteps, "_run", launches.replayed(DecodeSteps._run))
    monkeypatch.setattr(PromptGraphs, "run", launches.replayed(PromptGraphs.run))
    launches.are_new = True
    draw = random.Random(1)
    for _ in range(NUM_STEPS):
        shares, count = some_step(draw, max_length), runner._num_groups
        plan = trial_plan(shares, BLOCK_SIZE, draw.choice(PARAMS), NUM_BLOCKS * 3 // 4 // count * count, count)
        runner.launch(plan).result()
        runner._requests.clear()
        runner._rows.clear()
    assert num_warmed > 15
    assert not launches.late, sorted(launches.late)


@pytest.mark.parametrize(
    ("quant_mode", "backend", "num_experts", "max_length"),
    [
        ("none", "triton", 4, 1 << 14), ("fp8", "fa3", 0, 1024), ("int8-weight", "fa3 pages", 0, 1 << 14),
        ("int4-weight", "triton", 0, 1024),
    ],
)  # fmt: skip
def test_served_steps_launch_what_the_warm_up_did(
    quant_mode: str, backend: str, num_experts: int, max_length: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    launches: Launches,
) -> None:  # fmt: skip
    """Sequences may be longer than a step, or so short that several fill it."""
    save_model(tmp_path, hidden=1024, inner=1280 if num_experts else 2048, num_experts=num_experts)
    runner = open_runner(tmp_path, quant_mode, backend, monkeypatch, max_model_len=max_length)
    serve(runner, launches, max_length, monkeypatch)


@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("mla", {"max_model_len": 1024}), ("gemma", {"max_model_len": 1024}),
        ("gpt-oss", {"kv_cache_dtype": "fp8"}), ("gemma", {"num_speculative_tokens": 3}),
    ],
)  # fmt: skip
def test_other_families_too(
    family: str, changes: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, launches: Launches
) -> None:
    save_family(tmp_path, FAMILIES[family])
    runner = open_runner(tmp_path, "none", "triton", monkeypatch, **changes)
    serve(runner, launches, changes.get("max_model_len", 1 << 14), monkeypatch)


def test_layers_of_sampled_rows_have_sizes_that_the_warm_up_had(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, launches: Launches
) -> None:
    """With another number of rows cuBLAS may choose another kernel, and loading it waits for the device."""
    save_model(tmp_path, hidden=256, inner=512)
    sizes: set[tuple[int, tuple[int, ...]]] = set()
    multiply = torch.nn.functional.linear

    def noted(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        if x.shape[0] <= 1024:  # larger ones are of all tokens
            sizes.add((x.shape[0], tuple(weight.shape)))
        return multiply(x, weight, bias)

    monkeypatch.setattr(torch.nn.functional, "linear", noted)
    runner = open_runner(tmp_path, "none", "triton", monkeypatch, max_num_seqs=300)
    warmed = set(sizes)
    for num_rows in (1, 7, 64, 65, 128, 129, 200, 257, 300):
        plan = trial_plan([(5, 1)] * (num_rows - 1) + [(0, 1100)], BLOCK_SIZE, num_blocks=NUM_BLOCKS)
        runner.launch(plan).result()
        runner._requests.clear()
        runner._rows.clear()
    assert sizes == warmed
    assert {128, 192, 256, 320} <= {rows for rows, _ in warmed}
