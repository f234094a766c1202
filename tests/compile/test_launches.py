"""Kernels that each kind of step launches, in order: a change of ops that adds a launch fails here.

Tensors are `meta` ones of real sizes, as on an H200. Torch's own operations on a device count as launches, too.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from triton.runtime.jit import JITFunction

from engine.gpu.attention.backend import GpuInputs
from engine.gpu.forward import FusedForward
from engine.gpu.lowering import num_free_blocks
from engine.moe.moe import Moe
from tests.compile import hopper
from tests.compile.test_compiles_for_hopper import decode_inputs, forward_over, ints, model_of, prompt_inputs

NUM_LAYERS = 3
VIEWS = {"view", "slice", "select", "unsqueeze", "transpose", "empty", "empty_like", "detach"}


class TorchOps(TorchDispatchMode):
    """Adds the names of torch's operations to `found`, without views and allocations, which launch nothing."""

    def __init__(self, found: list[str]) -> None:
        super().__init__()
        self._found = found

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.__name__.split(".")[0]
        if name not in VIEWS:
            self._found.append("cublas" if name == "linear" else name)
        return func(*args, **(kwargs or {}))


@pytest.fixture
def launches() -> Iterator[list[str]]:
    found: list[str] = []

    def at_grid(self: Any, grid: Any) -> Any:
        return lambda *args, **constants: found.append(self.__name__.strip("_").removesuffix("_kernel"))

    with pytest.MonkeyPatch.context() as patch:
        hopper.install(patch)
        patch.setattr(JITFunction, "__getitem__", at_grid)
        yield found


def launched(forward: FusedForward, inputs: GpuInputs, launches: list[str]) -> list[str]:
    """Return the launches of a pass over all layers, without the output projection."""
    launches.clear()
    with TorchOps(launches), torch.inference_mode():
        forward.hidden(inputs)
    return [name for name in launches if name not in ("plan", "combine")]  # of decode attention


def repeated(start: Sequence[str], attention: Sequence[str], mlp: Sequence[str], end: str, between: str) -> list[str]:
    """Return a model's launches: norms `between` blocks; `start` includes the first norm, `end` is the last one."""
    blocks: list[str] = []
    for index in range(2 * NUM_LAYERS):
        blocks += [between] * (index > 0 and bool(between)) + [*(mlp if index % 2 else attention)]
    return [*start, *blocks, end]


ATTEND = ["rope", "paged_decode"]
PLAIN = {
    1: repeated(["embedding"], ["gemv", *ATTEND, "gemv"], ["gemv", "gemv"], "rms_norm", ""),
    8: repeated(["embed_norm"], ["skinny", *ATTEND, "skinny"], ["gated", "skinny"], "rms_norm", "rms_norm"),
    32: repeated(
        ["embed_norm"], ["skinny", *ATTEND, "skinny"], ["skinny", "silu_mul", "skinny"], "rms_norm", "rms_norm"
    ),
    64: repeated(["embed_norm"], ["cublas", *ATTEND, "cublas"], ["gated", "cublas"], "rms_norm", "rms_norm"),
    200: repeated(
        ["embed_norm"], ["cublas", *ATTEND, "cublas"], ["cublas", "silu_mul", "cublas"], "rms_norm", "rms_norm"
    ),
}


@pytest.mark.parametrize("rows", PLAIN)
def test_decode_steps_of_plain_weights(rows: int, launches: list[str]) -> None:
    forward = forward_over(model_of("qwen2.5-7b", "none", NUM_LAYERS), torch.bfloat16)
    assert launched(forward, decode_inputs(rows), launches) == PLAIN[rows]


@pytest.mark.parametrize("rows", [1, 8, 64])
def test_decode_steps_of_small_weights(rows: int, launches: list[str]) -> None:
    forward = forward_over(model_of("qwen3-0.6b", "none", NUM_LAYERS), torch.bfloat16)
    norm = "add_rms_norm_of_partials"
    attention, mlp = ["preloaded", *ATTEND, "preloaded"], ["preloaded", "silu_mul_of_partials", "preloaded"]
    assert launched(forward, decode_inputs(rows), launches) == repeated(["embed_norm"], attention, mlp, norm, norm)


@pytest.mark.parametrize("mode", ["fp8", "w8a8"])
def test_decode_steps_of_quantized_inputs(mode: str, launches: list[str]) -> None:
    """Only the attention's output is quantized in a kernel of its own."""
    forward = forward_over(model_of("qwen2.5-7b", mode, NUM_LAYERS), torch.bfloat16)
    gemm = "sliced_k"
    attention = ["quantize", gemm, *ATTEND, "quantize", gemm]
    mlp = ["quantize", gemm, "quantize_with_maxima", gemm]
    assert launched(forward, decode_inputs(8), launches) == repeated(["embedding"], attention, mlp, "rms_norm", "")


def test_decode_steps_of_quantized_inputs_and_experts(launches: list[str]) -> None:
    """One kernel adds the experts' partial sums, norms and quantizes."""
    forward = forward_over(model_of("qwen3-30b-a3b", "fp8", NUM_LAYERS), torch.bfloat16)
    attention = ["quantize", "sliced_k", *ATTEND, "quantize", "sliced_k"]
    moe = ["rms_norm", "skinny", "route", "grouped", "grouped"]
    assert launched(forward, decode_inputs(8), launches) == repeated(
        ["embedding"], attention, moe, "add_rms_norm_of_partials", ""
    )


def test_decode_steps_of_quantized_inputs_beside_blocks_of_other_ops(launches: list[str]) -> None:
    """Blocks get quantized inputs even if others do not: DeepSeek's first MLP has them, its attention does not."""
    forward = forward_over(model_of("deepseek-v2-lite", "fp8", 1), torch.bfloat16)
    found = launched(forward, decode_inputs(8), launches)
    assert found[-5:] == ["quantize", "sliced_k", "quantize_with_maxima", "sliced_k", "rms_norm"]


@pytest.mark.parametrize(
    ("rows", "gemm", "router"), [(8, "skinny", "skinny"), (64, "cublas", "skinny"), (200, "cublas", "cublas")]
)
def test_decode_steps_that_dispatch_rows_to_experts(rows: int, gemm: str, router: str, launches: list[str]) -> None:
    """No separate kernel sorts, sums or gathers."""
    forward = forward_over(model_of("qwen3-30b-a3b", "none", NUM_LAYERS, num_ranks=2), torch.bfloat16, num_ranks=2)
    attention, moe = [gemm, *ATTEND, gemm], [router, "route", "dispatch", "grouped", "grouped"]
    found = launched(forward, decode_inputs(rows), launches)
    norm = "divided_norm"
    assert found == repeated(["vocab_parallel_embed", norm], attention, moe, norm, norm)


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_counting_is_a_kernel_behind_the_choice_of_experts(num_ranks: int, launches: list[str]) -> None:
    """No further kernel selects the choices of the rank's own experts."""
    model = model_of("qwen3-30b-a3b", "fp8" if num_ranks == 1 else "none", NUM_LAYERS, num_ranks=num_ranks)
    for block in model.blocks:
        if isinstance(block, Moe):
            block.loads = torch.zeros(block.rule.num_experts, dtype=torch.int64, device="meta")
    found = launched(forward_over(model, torch.bfloat16, num_ranks=num_ranks), decode_inputs(8), launches)
    behind = [found[at + 1] for at, name in enumerate(found) if name == "route"]
    assert behind == ["count_choices"] * NUM_LAYERS
    assert "choose_slots" not in found  # with one rank all are held, and dispatch numbers all


def test_decode_steps_with_norms_behind_blocks(launches: list[str]) -> None:
    """The kernel that adds the residual and norms computes these norms too."""
    forward = forward_over(model_of("gemma3-4b", "none", 6), torch.bfloat16)
    layer = ["skinny", *ATTEND, "skinny", "post_norm", "gated", "skinny", "post_norm"]
    assert launched(forward, decode_inputs(8, 6), launches) == ["embedding", "mul", "rms_norm", *6 * layer]


def test_queries_of_a_row_attend_together_where_no_window_and_no_sink_is(launches: list[str]) -> None:
    """A launch each, as without drafts."""
    for model, num_layers, num_groups, grouped in (
        ("qwen2.5-7b", 3, 1, [True] * 3),
        ("gemma3-4b", 6, 6, [False] * 5 + [True]),
        ("gpt-oss-20b", 2, 2, [False] * 2),
    ):
        forward = forward_over(model_of(model, "none", num_layers), torch.bfloat16)
        plain = decode_inputs(8, num_groups)
        expected = launched(forward, plain, launches)
        found = launched(forward, replace(plain, query_groups=ints(3, 8)), launches)
        assert [name == "paged_verify" for name in found if name.startswith("paged")] == grouped
        assert [name.replace("verify", "decode") for name in found] == expected


def test_a_decode_step_of_one_row_with_sinks_and_clamped_experts(launches: list[str]) -> None:
    forward = forward_over(model_of("gpt-oss-20b", "none", 2), torch.bfloat16)
    layer = ["gemv", *ATTEND, "gemv", "gemv", "route", "pair", "row_down"]
    assert launched(forward, decode_inputs(1, 2), launches) == ["embedding", *2 * layer, "rms_norm"]


def test_prompts_run_the_same_kernels_for_any_number_of_tokens(launches: list[str]) -> None:
    forward = forward_over(model_of("qwen2.5-7b", "none", NUM_LAYERS), torch.bfloat16)
    steps = [launched(forward, prompt_inputs(forward, lengths), launches) for lengths in ([100], [900, 40], [8192])]
    assert steps[0] == steps[1] == steps[2]
    counts = Counter(steps[0])
    assert counts["cublas"] == 4 * NUM_LAYERS
    assert counts["rope"] == counts["paged_prefill"] == counts["silu_mul"] == NUM_LAYERS
    assert counts["rms_norm"] == 2 * NUM_LAYERS


@pytest.mark.parametrize(("name", "num_layers", "num_groups"), [("qwen3-30b-a3b", 3, 1), ("gemma3-4b", 6, 6)])
def test_the_last_mlp_is_spared_tokens_that_nobody_wants(
    name: str, num_layers: int, num_groups: int, launches: list[str]
) -> None:
    model = model_of(name, "none", num_layers)
    forward = forward_over(model, torch.bfloat16)
    inputs = prompt_inputs(forward, [900, 40], num_groups)
    inputs.wanted = torch.empty(2, dtype=torch.int64, device="meta")
    with torch.inference_mode():
        assert forward.hidden(inputs).shape == (2, model.config.hidden_size)
    assert num_free_blocks(model.blocks) == 1


def test_choices_that_are_counted_are_of_all_tokens(launches: list[str]) -> None:
    model = model_of("qwen3-30b-a3b", "none", 1)
    for block in model.blocks:
        if isinstance(block, Moe):
            block.loads = torch.zeros(block.rule.num_experts, dtype=torch.int64, device="meta")
    assert num_free_blocks(model.blocks) == 0


def test_a_class_of_steps_is_lowered_once(launches: list[str]) -> None:
    forward = forward_over(model_of("qwen2.5-7b", "none", NUM_LAYERS), torch.bfloat16)
    choose = forward._forwards.choose
    assert choose(8, is_decode=True) is choose(8, is_decode=True)
    assert choose(100, is_decode=False) is choose(5000, is_decode=False)
    assert choose(1, is_decode=True) is not choose(1, is_decode=False)
