"""Every kernel that models of real sizes launch on an H200 compiles for it, fits it, and spills few registers.

The interpreter tests a kernel's results; errors of the compiler, or kernels too large for the chip, would first show
on a GPU.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from itertools import accumulate
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import Tensor

from common.model_files import resolve_model
from engine.gpu.attention.backend import GpuInputs, GroupInputs
from engine.gpu.forward import FusedForward
from engine.gpu.ops.rules import SINGLE_GPU, GpuSeams
from engine.gpu.steps.device_sampler import DeviceSampler
from engine.kv.memory import kv_layout
from engine.layers.weights import Partition
from engine.models.families import family_of
from engine.models.hf_config import architecture_of, config_from_hf, read_hf_config
from engine.models.model import Model
from engine.quantization.conversion import QuantizedConversion
from engine.quantization.gpu_linears import GpuLinears, packed_layer, w4a16_layer
from engine.ranks import RankContext
from engine.tensor_parallel.gpu_seams import shard_seams
from engine.tensor_parallel.rank_config import divided
from kernels.gpu.attention.decode_plan import plan_decode
from kernels.gpu.attention.kv_splits import DecodeWorkspace
from kernels.gpu.attention.paged_decode import paged_decode
from kernels.gpu.attention.paged_prefill import paged_prefill
from kernels.gpu.attention.prompt_tiles import LARGE_TILE, SMALL_TILE
from kernels.gpu.collectives.all_reduce import (
    GATHER_CHUNK,
    SymmetricMemory,
    all_gather,
    all_reduce_rms_norm,
    all_reduce_rms_norm_quantize,
)
from kernels.gpu.expert_parallel.divided_rows import combine_add_rms_norm, scatter_add_rms_norm
from kernels.gpu.expert_parallel.exchange_memory import ExchangeLayout, ExchangeMemory, rows_a_rank
from kernels.gpu.expert_parallel.expert_combine import combine
from kernels.gpu.expert_parallel.expert_dispatch import dispatch
from kernels.gpu.expert_parallel.expert_loads import count_choices
from kernels.gpu.expert_parallel.expert_slots import choose_slots
from kernels.gpu.few_rows.split_k import SplitKWorkspace
from kernels.gpu.kv_copies.kv_copy import copy_blocks, digest_blocks
from kernels.gpu.logit_rules.process_logits import LogitsRules, process_logits
from kernels.gpu.mla.latent_decode import latent_decode, latent_workspace, plan_latents
from kernels.gpu.mla.latent_prefill import latent_prefill
from kernels.gpu.mla.latent_rope import rotate_and_write_latents
from kernels.gpu.moe.expert_formats import bytes_of
from kernels.gpu.moe.expert_pairs import SortedPairs
from kernels.gpu.moe.expert_tuning import DOWN_ROW, GATE_UP_PAIRS, GATE_UP_ROW, GROUPED_DOWN, GROUPED_GATE_UP
from kernels.gpu.moe.grouped_gemm import MAX_UNSORTED, grouped_gemm
from kernels.gpu.moe.grouped_gemv import add_down_of_row, grouped_gemv
from kernels.gpu.moe.packed_experts import packed_experts, tile_of
from kernels.gpu.prefill_backends.gather_kv import gather_kv
from kernels.gpu.prompt_graphs.merge_splits import PrefillSplits, split_workspace
from kernels.gpu.prompt_graphs.split_tiles import WIDTH
from kernels.gpu.speculation.paged_verify import most_queries, paged_verify
from kernels.gpu.tuning import found
from kernels.kv_copies.kv_copy import WordCopy
from kernels.quantization.mxfp4 import filled
from kernels.quantization.packed_weights import PACKINGS, PackedWeight
from kernels.quantization.w4a16_gemm import PackedW4
from kvstore.layout import PoolGeometry
from tests.compile import hopper
from tests.compile.hopper import SHARED_BYTES, Compiled

META = torch.device("meta")
CONFIGS = Path(__file__).parents[2] / "benchmarks/configs"
BLOCK_SIZE, NUM_BLOCKS, MAX_BLOCKS, MAX_ROWS = 64, 1024, 64, 256
# CI compiles each kernel once or twice. Other rows, prompts and heads compile the same ones with other settings.
OTHER_SETTINGS = pytest.mark.soak


class Weights:
    """Returns empty tensors of the requested shapes."""

    def take(self, name: str, shape: tuple[int, ...], partition: Partition = Partition.NONE) -> Tensor:
        return torch.empty(shape, dtype=torch.bfloat16, device=META)


@pytest.fixture
def compiled() -> Iterator[list[Compiled]]:
    with pytest.MonkeyPatch.context() as patch:
        yield hopper.install(patch)


def model_of(name: str, quant_mode: str, num_layers: int, num_ranks: int = 1) -> Model:
    """Build a model. num_ranks: if above 1, build the first rank's shard, which dispatches rows to whole experts."""
    files = resolve_model(str(CONFIGS / name))
    raw = read_hf_config(files.path)
    family = family_of(architecture_of(raw))
    config = replace(family.adapt_config(config_from_hf(raw), raw), num_layers=num_layers)
    if num_ranks > 1:
        config = divided(config, num_ranks, 0, "dispatch")
    conversion = QuantizedConversion(quant_mode, None if quant_mode == "none" else GpuLinears(META))
    model = family.build(config, Weights(), conversion.convert)
    conversion.finish(model)
    return model


def forward_over(model: Model, kv_dtype: torch.dtype, num_ranks: int = 1) -> FusedForward:
    config = model.config
    geometry = PoolGeometry(kv_layout(config, kv_dtype), NUM_BLOCKS, BLOCK_SIZE, "")
    pool = torch.empty(NUM_BLOCKS, *geometry.block_shape, dtype=kv_dtype, device=META)
    group = None if num_ranks == 1 else cast(Any, SimpleNamespace(rank=0, size=num_ranks, rows=None))
    if group is not None and config.moe is not None:
        layout = ExchangeLayout(
            num_ranks, rows_a_rank(8192, num_ranks), config.hidden_size, config.moe.num_experts_per_token,
            torch.bfloat16,
        )  # fmt: skip
        own = ints(layout.num_bytes, dtype=torch.uint8)
        group.rows = ExchangeMemory.over(layout, 0, ints(num_ranks, dtype=torch.int64), own, counts=False)
    ranks: RankContext[GpuSeams] = SINGLE_GPU
    if group is not None:
        ranks = RankContext(shard_seams(group, model.config.vocab_size))
    return FusedForward(model, pool, MAX_ROWS, "triton", torch.bfloat16, 8192, ranks)


def ints(*shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
    return torch.empty(shape, dtype=dtype, device=META)


def decode_inputs(rows: int, num_groups: int = 1) -> GpuInputs:
    groups = [GroupInputs(ints(rows), ints(rows, MAX_BLOCKS))] * num_groups
    return GpuInputs(ints(rows, dtype=torch.int64), ints(rows), ints(rows), groups)


def prompt_inputs(forward: FusedForward, lengths: list[int], num_groups: int = 1) -> GpuInputs:
    starts, tables = [*accumulate(lengths, initial=0)], ints(len(lengths), MAX_BLOCKS)
    plans = forward.attention.plan(starts, lengths, [tables] * num_groups)
    total = starts[-1]
    groups = [GroupInputs(ints(total), ints(0, MAX_BLOCKS), plan) for plan in plans]
    return GpuInputs(ints(total, dtype=torch.int64), ints(total), ints(0), groups)


# Bytes that a thread may spill. `paged_prefill`: in its last, masked tile, once per program.
# `packed_rows`: at 8 rows, 4 bits with groups of 32. `all_reduce`: of 8 ranks, with quantization. `latent_decode`:
# with 128 heads; 8 with 16. `paged_decode`: with 4 warps. `packed_stream`: 5 bits.
# `packed_experts`: 128 pairs, and int4 with groups of 32.
SPILLS = {
    "_paged_decode_kernel": 16,
    "_paged_prefill_kernel": 320,
    "_rows_kernel": 48,
    "stream_kernel": 112,
    "experts_kernel": 48,
    "_all_reduce_norm_kernel": 32,
    "_latent_decode_kernel": 248,
}
VERIFY_SPILLS = {"_paged_verify_kernel": 64}  # 16 rows of sums in one warp, over 64 keys of 8 bits; others: up to 24
WINDOW_SPILLS = {"_paged_prefill_kernel": 512, "_paged_decode_kernel": 16}


def check(compiled: list[Compiled], *names: str, spills: Mapping[str, int] = SPILLS) -> None:
    assert {*names} <= {kernel.name for kernel in compiled}, compiled
    for kernel in compiled:
        assert kernel.shared_bytes <= SHARED_BYTES, kernel
        assert kernel.spilled <= spills.get(kernel.name, 0), kernel
        assert not kernel.is_serial, kernel


MODES = {
    ("qwen2.5-7b", "none", torch.bfloat16): ["_gemv_kernel", "_gated_kernel"],
    ("qwen3-0.6b", "none", torch.bfloat16): ["_preloaded_kernel"],
    ("llama3.1-8b", "none", torch.float8_e4m3fn): ["_gemv_kernel"],
    ("qwen2.5-7b", "fp8", torch.bfloat16): ["_sliced_k_kernel", "_quantize_kernel"],
    ("qwen2.5-7b", "w8a8", torch.bfloat16): ["_sliced_k_kernel", "_quantize_kernel"],
    ("qwen2.5-7b", "int8-weight", torch.bfloat16): ["_sliced_k_kernel", "_skinny_kernel"],
    ("qwen2.5-7b", "int4-weight", torch.bfloat16): ["_rows_kernel"],
    ("qwen3-30b-a3b", "none", torch.bfloat16): ["_route_kernel", "_pair_kernel", "_sort_kernel", "_grouped_kernel"],
}
IN_CI = {  # decode rows and prompts
    ("qwen3-0.6b", "none"): ((1,), ()),
    ("llama3.1-8b", "none"): ((64,), (8192,)),
    ("qwen2.5-7b", "fp8"): ((1, 64), ()),
    ("qwen2.5-7b", "int4-weight"): ((1,), ()),  # more rows: test_gemms_of_int4_weights
    ("qwen3-30b-a3b", "none"): ((1, 64), (8192,)),
}


@pytest.mark.parametrize(
    ("mode", "decode_rows", "prompts"),
    [
        *((mode, *IN_CI[mode[:2]]) for mode in MODES if mode[:2] in IN_CI),
        *(pytest.param(mode, (1, 8, 40, 64, 256), (100, 8192), marks=OTHER_SETTINGS) for mode in MODES),
    ],
    ids=str,
)
def test_steps(
    mode: tuple[str, str, torch.dtype], decode_rows: tuple[int, ...], prompts: tuple[int, ...],
    compiled: list[Compiled],
) -> None:  # fmt: skip
    name, quant_mode, kv_dtype = mode
    forward = forward_over(model_of(name, quant_mode, 1), kv_dtype)
    for rows in decode_rows:
        forward.logits(forward.hidden(decode_inputs(rows)))
    for length in prompts:
        forward.hidden(prompt_inputs(forward, [length]))
    of_few_rows = MODES[mode] if 1 in decode_rows else []
    check(compiled, "_rope_kernel", "_paged_decode_kernel", *["_paged_prefill_kernel"] * bool(prompts), *of_few_rows)


@pytest.mark.parametrize(
    ("rows", "group", "kernel"),
    [
        pytest.param(1, 128, "_rows_kernel", marks=OTHER_SETTINGS), (4, 32, "_rows_kernel"),
        (16, 32, "stream_kernel"), (32, 128, "stream_kernel"), (128, 128, "stream_kernel"),
    ],
)  # fmt: skip
def test_gemms_of_int4_weights(rows: int, group: int, kernel: str, compiled: list[Compiled]) -> None:
    n, k = 37888, 3584
    scales = torch.empty(n, k // group, 2, dtype=torch.bfloat16, device=META)
    linear = w4a16_layer(PackedW4(ints(n, k // 4, dtype=torch.int16), scales, group), None, SplitKWorkspace(META))
    linear(torch.empty(rows, k, dtype=torch.bfloat16, device=META))
    check(compiled, kernel)


@pytest.mark.parametrize("rows", [1, pytest.param(8, marks=OTHER_SETTINGS), pytest.param(64, marks=OTHER_SETTINGS)])
@pytest.mark.parametrize("bits", [pytest.param(2, marks=OTHER_SETTINGS), 3, 5, pytest.param(6, marks=OTHER_SETTINGS)])
def test_gemms_of_other_packed_weights(bits: int, rows: int, compiled: list[Compiled]) -> None:
    n, k, packing = 37888, 3584, PACKINGS[bits]
    high = {3: ints(n, k // 16, dtype=torch.int16), 5: ints(n, k // 8, dtype=torch.uint8)}
    high[6] = ints(n, k // 8, dtype=torch.int16)
    pairs = torch.empty(n, k // (16 if bits == 2 else 32), 2, dtype=torch.bfloat16, device=META)
    packed = PackedWeight(ints(n, k // packing.parts, dtype=torch.int16), high.get(bits), pairs, bits)
    packed_layer(packed, None, SplitKWorkspace(META))(torch.empty(rows, k, dtype=torch.bfloat16, device=META))
    check(compiled, "_rows_kernel" if rows == 1 else "stream_kernel")


EXPERTS, INNER, HIDDEN, TOP_K = 128, 768, 2048, 8


@pytest.mark.parametrize(
    ("columns", "dtype", "scales", "scales_dtype"),
    [
        (HIDDEN // 4, torch.int16, (HIDDEN // 32, 2), torch.bfloat16),
        pytest.param(
            HIDDEN // 4, torch.int16, (HIDDEN // 32,), torch.uint8, marks=OTHER_SETTINGS
        ),  # with biases below
        (HIDDEN, torch.float8_e4m3fn, (HIDDEN // 128,), torch.float32),
    ],
    ids=["int4", "mxfp4", "fp8 in blocks"],
)
def test_grouped_gemms_of_packed_experts(
    columns: int, dtype: torch.dtype, scales: tuple[int, ...], scales_dtype: torch.dtype, compiled: list[Compiled]
) -> None:
    weight = torch.empty(EXPERTS, 2 * INNER, columns, dtype=dtype, device=META)
    of_groups = torch.empty(EXPERTS, 2 * INNER, *scales, dtype=scales_dtype, device=META)
    itemsize = bytes_of(weight)
    few, many = (torch.empty(num_tokens, HIDDEN, dtype=torch.bfloat16, device=META) for num_tokens in (2, 8192))
    pairs = found(GATE_UP_PAIRS.find(itemsize=itemsize, columns=HIDDEN))
    grouped_gemv(few, weight, ints(2, TOP_K), pairs, TOP_K, scales=of_groups)
    tile = found(GROUPED_GATE_UP.find(pairs_per_expert=8192 * TOP_K / EXPERTS, itemsize=itemsize))
    sorted_pairs = SortedPairs(ints(8192 * TOP_K), ints(EXPERTS))
    grouped_gemm(many, weight, sorted_pairs, tile, TOP_K, scales=of_groups)
    check(compiled, "_pair_kernel", "_grouped_kernel")


@pytest.mark.parametrize("pairs_per_expert", [2, *(pytest.param(n, marks=OTHER_SETTINGS) for n in (8, 32)), 1024])
@pytest.mark.parametrize("group", [pytest.param(32, marks=OTHER_SETTINGS), 128])
def test_packed_experts(pairs_per_expert: int, group: int, compiled: list[Compiled]) -> None:
    num_tokens = pairs_per_expert * EXPERTS // TOP_K
    pairs = SortedPairs(ints(num_tokens * TOP_K), ints(EXPERTS))
    shares = torch.empty(num_tokens, TOP_K, dtype=torch.float32, device=META)
    for rows, columns, chosen in ((2 * INNER, HIDDEN, None), (HIDDEN, INNER, shares)):
        x = torch.empty(num_tokens * (1 if chosen is None else TOP_K), columns, dtype=torch.bfloat16, device=META)
        weight = ints(EXPERTS, rows, columns // 4, dtype=torch.int16)
        scales = torch.empty(EXPERTS, rows, columns // group, 2, dtype=torch.bfloat16, device=META)
        tile = tile_of(weight, scales, chosen is None, pairs_per_expert)
        if tile is not None:
            packed_experts(x, weight, pairs, tile, TOP_K, chosen, scales, None)
    check(compiled, "experts_kernel")


@pytest.mark.parametrize("all_tokens", [(16, 8192), pytest.param((256,), marks=OTHER_SETTINGS)])
def test_mxfp4_experts_with_biases_and_a_clamped_gate(all_tokens: tuple[int, ...], compiled: list[Compiled]) -> None:
    """gpt-oss-20b's, whose 2,880 columns are filled up to 2,944."""
    num_experts, top_k, n, inner, gate = 32, 4, 2880, filled(2880), (1.702, 7.0)

    def weights(rows: int) -> tuple[Tensor, Tensor, Tensor]:
        words = torch.empty(num_experts, rows, inner // 4, dtype=torch.int16, device=META)
        exponents = torch.empty(num_experts, rows, inner // 32, dtype=torch.uint8, device=META)
        return words, exponents, torch.empty(num_experts, rows, dtype=torch.bfloat16, device=META)

    def hidden(rows: int, columns: int = n) -> Tensor:
        return torch.empty(rows, columns, dtype=torch.bfloat16, device=META)

    def shares(rows: int) -> Tensor:
        return torch.empty(rows, top_k, dtype=torch.float32, device=META)

    (gate_up, scales, bias), (down, down_scales, down_bias) = weights(2 * inner), weights(n)
    row, down_row = (found(table.find(itemsize=0.5, columns=n)) for table in (GATE_UP_ROW, DOWN_ROW))
    x, inside = hidden(1), hidden(top_k, inner)
    grouped_gemv(x, gate_up, ints(1, top_k), row, top_k, norm=x[0], eps=1e-5, scales=scales, bias=bias, gate=gate)
    add_down_of_row(inside, down, ints(1, top_k), shares(1), down_row, x, down_scales, down_bias)
    for tokens in all_tokens:
        load, pairs = tokens * top_k / num_experts, SortedPairs(ints(tokens * top_k), ints(num_experts))
        chosen: SortedPairs | Tensor = ints(tokens, top_k) if tokens <= MAX_UNSORTED else pairs
        up_tile = found(GROUPED_GATE_UP.find(pairs_per_expert=load, itemsize=0.5))
        tile = found(GROUPED_DOWN.find(pairs_per_expert=load, itemsize=0.5, columns=0))
        grouped_gemm(hidden(tokens), gate_up, chosen, up_tile, top_k, scales=scales, bias=bias, gate=gate)
        inside = hidden(tokens * top_k, inner)
        grouped_gemm(inside, down, chosen, tile, top_k, shares(tokens), down_scales, down_bias)
        of_gate_up = found(tile_of(gate_up, scales, True, load))
        of_down = found(tile_of(down, down_scales, False, load))
        packed_experts(hidden(tokens), gate_up, pairs, of_gate_up, top_k, None, scales, bias, gate)
        packed_experts(inside, down, pairs, of_down, top_k, shares(tokens), down_scales, down_bias)
    check(compiled, "_pair_kernel", "_row_down_kernel", "_grouped_kernel")


@pytest.mark.parametrize(
    ("rows", "num_heads"),
    [(64, 128), *(pytest.param(*each, marks=OTHER_SETTINGS) for each in ((1, 16), (64, 16), (1, 128)))],
)
def test_decode_over_latents(num_heads: int, rows: int, compiled: list[Compiled]) -> None:
    rank, width = 512, 576
    pool = torch.empty(NUM_BLOCKS, 1, 1, 1, BLOCK_SIZE, width, dtype=torch.bfloat16, device=META)
    q = torch.empty(rows, num_heads, width, dtype=torch.bfloat16, device=META)
    workspace = latent_workspace(rows, num_heads, rank, META)
    plan = plan_latents(ints(rows), num_heads, 2)
    latent_decode(q, pool, rank, 0.1, 0, ints(rows, MAX_BLOCKS), ints(rows), plan, workspace)
    latent_prefill(q, pool, rank, 0.1, 0, ints(rows, MAX_BLOCKS), ints(9, 4))
    heads = torch.empty(rows, num_heads, 192, dtype=torch.bfloat16, device=META)
    latents, table = (torch.empty(rows, n, dtype=torch.bfloat16, device=META) for n in (width, 128))
    rotate_and_write_latents(
        heads, latents, latents[0, :rank], 1e-6, table.view(-1, 2, 64), ints(rows), ints(rows), q, pool, 0
    )
    check(compiled, "_latent_decode_kernel", "_latent_prefill_kernel", "_latent_rope_kernel")


@pytest.mark.parametrize("kv_dtype", [pytest.param(torch.bfloat16, marks=OTHER_SETTINGS), torch.float8_e4m3fn])
@pytest.mark.parametrize(
    "all_rows", [(8, 4 * MAX_ROWS), pytest.param((1, 32, 64, 192, MAX_ROWS), marks=OTHER_SETTINGS)], ids=str
)
@pytest.mark.parametrize(
    ("num_heads", "num_kv_heads", "head_dim"),
    [
        (28, 4, 128),
        *(pytest.param(*shape, marks=OTHER_SETTINGS) for shape in ((32, 8, 128), (16, 8, 128), (64, 8, 128))),
        *(pytest.param(*shape, marks=OTHER_SETTINGS) for shape in ((32, 2, 128), (9, 3, 64), (8, 4, 256))),
    ],
)
def test_decode_of_several_queries_a_row(
    num_heads: int, num_kv_heads: int, head_dim: int, all_rows: tuple[int, ...], kv_dtype: torch.dtype,
    compiled: list[Compiled],
) -> None:  # fmt: skip
    queries = most_queries(num_heads // num_kv_heads)
    pool = torch.empty(NUM_BLOCKS, 1, 2, num_kv_heads, BLOCK_SIZE, head_dim, dtype=kv_dtype, device=META)
    workspace = DecodeWorkspace(4 * MAX_ROWS, num_heads, num_kv_heads, head_dim, META, queries)
    for rows in all_rows:
        q = torch.empty(rows, num_heads, head_dim, dtype=torch.bfloat16, device=META)
        plan = plan_decode(ints(rows), num_heads, pool, 0, ints(3, rows), queries)
        paged_verify(q, pool, 0, ints(rows, MAX_BLOCKS), ints(rows), ints(3, rows), plan, workspace)
    check(compiled, "_paged_verify_kernel", spills=VERIFY_SPILLS)


def test_prefill_splits(compiled: list[Compiled]) -> None:
    num_heads, num_kv_heads, head_dim, num_spare = 28, 4, 128, 66  # Qwen2.5-7B
    pool = torch.empty(NUM_BLOCKS, 1, 2, num_kv_heads, BLOCK_SIZE, head_dim, dtype=torch.bfloat16, device=META)
    q = torch.empty(1024, num_heads, head_dim, dtype=torch.bfloat16, device=META)
    workspace = split_workspace(num_spare, num_kv_heads, SMALL_TILE, head_dim, META)
    splits = PrefillSplits(ints(num_spare, 4), *workspace)
    paged_prefill(q, pool, 0, ints(64, MAX_BLOCKS), ints(180, WIDTH), SMALL_TILE, splits=splits)
    check(compiled, "_paged_prefill_kernel", "_merge_kernel")


@OTHER_SETTINGS
def test_a_window_over_8_bit_kv(compiled: list[Compiled]) -> None:
    num_heads, num_kv_heads, head_dim, window = 32, 8, 128, 4096  # Mistral-v0.1
    pool = torch.empty(NUM_BLOCKS, 1, 2, num_kv_heads, BLOCK_SIZE, head_dim, dtype=torch.float8_e4m3fn, device=META)
    workspace = DecodeWorkspace(64, num_heads, num_kv_heads, head_dim, META)
    for rows in (1, 64):
        q = torch.empty(rows, num_heads, head_dim, dtype=torch.bfloat16, device=META)
        plan = plan_decode(ints(rows), num_heads, pool, window)
        paged_decode(q, pool, 0, ints(rows, MAX_BLOCKS), ints(rows), plan, workspace)
    for tile_m in (SMALL_TILE, LARGE_TILE):
        paged_prefill(q, pool, 0, ints(64, MAX_BLOCKS), ints(9, 4), tile_m, window=window)
    # A window's first keys are a second masked loop.
    check(compiled, "_paged_decode_kernel", "_paged_prefill_kernel", spills=WINDOW_SPILLS)


@pytest.mark.parametrize(
    ("name", "num_layers", "rows", "prompts", "kernels"),
    [
        ("gemma3-4b", 6, (8,), (), ["_post_norm_kernel", "_gated_kernel"]),
        ("gpt-oss-20b", 2, (40,), (8192,), ["_grouped_kernel", "_paged_prefill_kernel"]),
        pytest.param("gemma3-4b", 6, (1, 256), (8192,), ["_post_norm_kernel"], marks=OTHER_SETTINGS),
        pytest.param("gpt-oss-20b", 2, (1,), (), ["_pair_kernel"], marks=OTHER_SETTINGS),
    ],
)
def test_steps_of_kv_groups(
    name: str, num_layers: int, rows: tuple[int, ...], prompts: tuple[int, ...], kernels: list[str],
    compiled: list[Compiled],
) -> None:  # fmt: skip
    """With layers that have a window and one that has none."""
    forward = forward_over(model_of(name, "none", num_layers), torch.bfloat16)
    for count in rows:
        forward.hidden(decode_inputs(count, num_layers))
    for length in prompts:
        forward.hidden(prompt_inputs(forward, [length], num_layers))
    check(compiled, "_paged_decode_kernel", *kernels, spills=WINDOW_SPILLS)


@pytest.mark.parametrize(
    ("decode_rows", "prompt"), [((64,), 8192), pytest.param((1, 8, 40, 256), 100, marks=OTHER_SETTINGS)], ids=str
)
def test_steps_of_latents_and_experts(decode_rows: tuple[int, ...], prompt: int, compiled: list[Compiled]) -> None:
    forward = forward_over(model_of("deepseek-v2-lite", "none", 2), torch.bfloat16)  # a dense layer, one with experts
    for rows in decode_rows:
        forward.hidden(decode_inputs(rows))
    forward.hidden(prompt_inputs(forward, [prompt]))
    check(compiled, "_latent_rope_kernel", "_latent_decode_kernel", "_expanded_prefill_kernel", "_grouped_kernel")


def test_sampling(compiled: list[Compiled]) -> None:
    sampler = DeviceSampler(MAX_ROWS, 152_064, META)
    logits = torch.empty(64, 152_064, dtype=torch.bfloat16, device=META)
    sampler.sample(logits, slice(64), ints(64), ints(64, dtype=torch.int64))
    rules = LogitsRules.empty(MAX_ROWS, 152_064, 1024, META)
    rows = ints(32, dtype=torch.int64)
    process_logits(logits, rows, rows, rules, torch.empty(32, 152_064, device=META))
    check(compiled, "_chunk_kernel", "_finish_kernel", "_process_kernel")


@pytest.mark.parametrize("size", [pytest.param(2, marks=OTHER_SETTINGS), 8])
def test_exchanges_between_ranks(size: int, compiled: list[Compiled]) -> None:
    sums = SymmetricMemory(ints(size, dtype=torch.int64), ints(512), 1, size, 512, 8192, torch.bfloat16)
    x = torch.empty(64, 8192, dtype=torch.bfloat16, device=META)
    all_reduce_rms_norm(x, torch.empty_like(x), x[0], 1e-5, sums)
    all_reduce_rms_norm_quantize(x, torch.empty_like(x), x[0], 1e-5, sums, torch.float8_e4m3fn)
    gathers = SymmetricMemory(ints(size, dtype=torch.int64), ints(9728), 0, size, 9728, GATHER_CHUNK, torch.bfloat16)
    logits = torch.empty(256, 76032, dtype=torch.bfloat16, device=META)
    all_gather(logits, gathers)
    all_gather(logits, gathers, only=ints(256))
    check(compiled, "_all_reduce_norm_kernel", "_all_gather_kernel")


def test_exchanges_around_experts(compiled: list[Compiled]) -> None:
    size = 4
    layout = ExchangeLayout(size, 512, 2048, 8, torch.bfloat16)
    own = ints(layout.num_bytes, dtype=torch.uint8)
    memory = ExchangeMemory.over(layout, 1, ints(size, dtype=torch.int64), own, counts=False)
    y = torch.empty(64, 2048, dtype=torch.bfloat16, device=META)
    residual = y[: 64 // size]
    x = scatter_add_rms_norm(y, residual, y[0], 1e-5, memory, gathers=False)
    scatter_add_rms_norm(y, residual, y[0], 1e-5, memory, gathers=True)
    shares = torch.empty(64 // size, 8, device=META)
    chosen = shares.int()
    count_choices(chosen, ints(64), ints(128, dtype=torch.int64))
    choose_slots(chosen, ints(128, 3, dtype=torch.int64), ints(128, dtype=torch.int64), range(136))
    came = dispatch(x, shares, chosen, 64, 136 // size, memory)
    parts = torch.empty(8, 64, 2048, dtype=torch.bfloat16, device=META)
    combine(parts, came, memory)
    combine_add_rms_norm(parts, came, residual, y[0], 1e-5, memory, gathers=True)
    check(compiled, "_count_choices_kernel", "_choose_slots_kernel")
    check(compiled, "_divided_norm_kernel", "_dispatch_kernel", "_combine_kernel")


def test_copies_of_blocks(compiled: list[Compiled]) -> None:
    words = 64 * 1024 * 28 // 8
    pool, ids = ints(NUM_BLOCKS, words, dtype=torch.int64), ints(16)
    copy_blocks(pool, ids, pool, ids, ints(2, words, dtype=torch.int64))
    some = WordCopy(height=28, width=words // 112, source_offset=words // 2, source_pitch=words // 56,
                    target_offset=0, target_pitch=words // 56)  # fmt: skip
    copy_blocks(pool, ids, pool, ids, ints(2, words, dtype=torch.int64), some)
    digest_blocks(pool, ids, ints(2, words, dtype=torch.int64))
    layers = torch.empty(NUM_BLOCKS, 1, 2, 4, BLOCK_SIZE, 128, dtype=torch.bfloat16, device=META)
    gather_kv(layers, 0, ints(4, MAX_BLOCKS), ints(9, 4), torch.empty(2, 4, 4096, 128, device=META))
    check(compiled, "_kv_copy_kernel", "_kv_digest_kernel", "_gather_kv_kernel")
