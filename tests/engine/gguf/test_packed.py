"""Layers over packed GGUF blocks: each type in both forms, and a model that keeps them."""

from __future__ import annotations

import logging
import shutil
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import patch

import gguf
import pytest
import torch
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from torch import Tensor

from engine.config import EngineConfig
from engine.dummy_weights.weights import DummyWeights
from engine.gguf import choose
from engine.gguf.packed import BlockGemm, block_linear
from engine.gguf.q8_0 import BlockLinears, quantize_q8_0
from engine.layers.linear import Linear
from engine.moe.moe import Expert, Moe
from engine.moe.stacked_moe import ClampedExpert
from engine.quantization.cpu_linears import int8
from kernels.gguf import linear
from kernels.gguf.experts import BlockExperts
from kernels.gguf.library import FOLDER, declared, library
from kernels.gguf.linear import BLOCK_COLUMNS, Blocks, BlockWeight
from kernels.native.compile import AVX512, VARIANTS, Variant, library_path
from kernels.native.library import loaded, variants_of_this_cpu
from tests.engine.driving import directory, generate, open_model, random_prompt
from tests.engine.gguf.gguf_files import load_and_read, random_blocks, write_wide
from tests.engine.tiny_models import TINY_MODELS, VOCAB_SIZE, TinyModel

Kind = GGMLQuantizationType
KINDS = sorted(map(GGMLQuantizationType, BLOCK_COLUMNS))
IN_INTEGERS = set(KINDS) - {Kind.Q5_1, Kind.Q2_K, Kind.Q3_K}

needs_library = pytest.mark.skipif(
    shutil.which("gcc") is None or next(variants_of_this_cpu(), None) is None,
    reason="this CPU has no AVX2, or no gcc",
)


@pytest.fixture(params=VARIANTS, ids=["avx512", "avx2"])
def _variant(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make weights created in the test use this variant."""
    if request.param not in variants_of_this_cpu():
        pytest.skip("this CPU lacks its instructions")
    monkeypatch.setattr(linear, "library", lambda: declared(loaded(FOLDER, request.param)))


def some_blocks(kind: GGMLQuantizationType, num_rows: int, num_columns: int) -> tuple[Blocks, torch.Tensor]:
    """Make rows of random blocks with sane scales, and the float32 numbers that `gguf` reads from them."""
    raw = random_blocks(kind, (num_rows, num_columns))
    return Blocks(torch.from_numpy(raw), int(kind)), torch.from_numpy(gguf.dequantize(raw, kind))


def within(found: torch.Tensor, exact: torch.Tensor, most: float) -> bool:
    """Whether the largest error is at most `most` times the largest exact value."""
    return float((found.float() - exact).abs().max()) <= most * float(exact.abs().max())


@needs_library
@pytest.mark.usefixtures("_variant")
@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_weights_are_dequantized_to_the_bit(kind: GGMLQuantizationType) -> None:
    blocks, exact = some_blocks(kind, 37, 512)
    assert GGML_QUANT_SIZES[kind][0] == BLOCK_COLUMNS[kind]
    assert torch.equal(BlockWeight([blocks], 512).dequantize(), exact.bfloat16())


@needs_library
@pytest.mark.usefixtures("_variant")
@pytest.mark.parametrize("num_columns", [512, 768])
@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_products(kind: GGMLQuantizationType, num_columns: int) -> None:
    """In integers, where only x is rounded, and in bfloat16; with rows and columns that fill no vector."""
    blocks, exact = some_blocks(kind, 37, num_columns)
    weight = BlockWeight([blocks], num_columns)
    bias = torch.randn(37).bfloat16()
    assert weight.has_integers == (kind in IN_INTEGERS)
    for num_x in (1, 7, 8, 9, 13, 25):
        x = torch.randn(num_x, num_columns).bfloat16()
        expected = x.float() @ exact.T + bias.float()
        assert within(weight.linear(x, bias, torch.float32, in_integers=False), expected, 0.01)
        assert within(weight.linear(x.float(), bias, torch.bfloat16, in_integers=False), expected, 0.01)
        if weight.has_integers:
            assert within(weight.linear(x, bias, torch.float32, in_integers=True), expected, 1e-4)
            assert within(weight.linear(x.float(), None, torch.float32, True), expected - bias.float(), 1e-4)


@needs_library
@pytest.mark.usefixtures("_variant")
@pytest.mark.parametrize("kind", [Kind.Q4_0, Kind.Q8_0], ids=lambda kind: kind.name)
def test_an_odd_number_of_blocks_in_a_row_is_dequantized(kind: GGMLQuantizationType) -> None:
    """The integer product needs pairs of blocks, which share an accumulator."""
    blocks, exact = some_blocks(kind, 37, 96)
    weight = BlockWeight([blocks], 96)
    assert not weight.has_integers
    layer = block_linear(weight, None, 12)
    x = torch.randn(5, 96).bfloat16()
    assert layer.dense is None
    assert within(layer(x), x.float() @ exact.T, 0.01)


@needs_library
@pytest.mark.usefixtures("_variant")
def test_x_of_zeros_gives_the_bias() -> None:
    blocks, _ = some_blocks(Kind.Q4_K, 20, 256)
    bias = torch.randn(20).bfloat16()
    for in_integers in (False, True):
        found = BlockWeight([blocks], 256).linear(torch.zeros(3, 256), bias, torch.float32, in_integers)
        assert torch.equal(found, bias.float().expand(3, -1))


@needs_library
@pytest.mark.usefixtures("_variant")
@pytest.mark.parametrize("in_integers", [False, True])
def test_a_row_has_the_same_bits_among_any_others(in_integers: bool) -> None:
    """Also with several types in one layer, as in fused q, k and v."""
    kinds = ((Kind.Q5_0, 48), (Kind.Q4_1, 20), (Kind.Q6_K, 33), (Kind.Q8_0, 19), (Kind.Q4_K, 18), (Kind.Q5_K, 17))
    parts = [some_blocks(kind, rows, 256)[0] for kind, rows in kinds]
    weight = BlockWeight(parts, 256)
    x = torch.randn(27, 256).bfloat16()
    together = weight.linear(x, None, torch.bfloat16, in_integers)
    assert together.shape == (27, 155)
    for first, last in ((0, 1), (1, 3), (3, 11), (20, 27)):
        assert torch.equal(weight.linear(x[first:last], None, torch.bfloat16, in_integers), together[first:last])


@needs_library
def test_a_layer_chooses_by_rows_of_x() -> None:
    blocks, exact = some_blocks(Kind.Q4_K, 64, 256)
    layer = block_linear(BlockWeight([blocks], 256), None, 12)
    assert layer.dense is not None
    x = torch.randn(13, 256).bfloat16()
    assert torch.equal(layer(x), layer.dense(x))
    assert not torch.equal(layer(x[:-1]), layer.dense(x[:-1]))
    assert within(layer(x[:-1]), x[:-1].float() @ exact.T, 0.01)


@needs_library
@pytest.mark.parametrize("quantization", ["Q4_1", "Q8_0"])
def test_a_model_keeps_its_blocks_and_stays_closer_to_the_file_than_with_int8(
    tmp_path: Path, quantization: str
) -> None:
    files, found = write_wide(tmp_path, quantization), {}
    for mode, dtype in (("none", "float32"), ("int8-weight", "bfloat16"), ("auto", "bfloat16")):
        loaded, found[mode] = load_and_read(files, dtype, mode)
    assert loaded.quant_mode == "gguf"
    error = {mode: float((values - found["none"]).abs().mean()) for mode, values in found.items()}
    assert error["auto"] < error["int8-weight"]


def test_without_a_compiler_weights_are_converted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("CC", "/no/such/compiler")
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: dict.fromkeys(AVX512.instructions, True))
    with caplog.at_level(logging.WARNING):
        assert library.__wrapped__() is None
    assert "/no/such/compiler" in caplog.text
    monkeypatch.setattr(torch.cpu, "get_capabilities", dict)
    assert library.__wrapped__() is None


@needs_library
def test_weights_stay_in_the_mapped_file(tmp_path: Path) -> None:
    files = write_wide(tmp_path, "Q8_0", "Qwen2")
    loaded, _ = open_model(files, dtype="bfloat16")
    lines = Path("/proc/self/maps").read_text().splitlines()
    mapped = [line.split("-") for line in lines if line.endswith(str(files.path))]
    ranges = [range(int(start, 16), int(rest.split()[0], 16)) for start, rest, *_ in mapped]
    for ref in loaded.model.linears():
        assert any(ref.layer.weight.data_ptr() in addresses for addresses in ranges), ref.attribute


@needs_library
@pytest.mark.parametrize("variant", VARIANTS, ids=["avx512", "avx2"])
def test_the_library_is_compiled_once(variant: Variant, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also for another CPU, as in images, for which no other test compiles the real sources."""
    library_path(FOLDER, variant)  # libraries of this version may be in the user's cache
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    folder = tmp_path / "sources"
    folder.mkdir()
    (folder / "one.c").write_text("int one(void) { return 1; }\n")
    made = library_path(folder, variant)
    assert made.is_relative_to(tmp_path)
    written = made.stat().st_mtime_ns
    assert library_path(folder, variant) == made
    assert made.stat().st_mtime_ns == written
    assert [path.name for path in made.parent.iterdir()] == [made.name]


# -- plain weights as blocks of Q8_0 ---------------------------------------------------------------------------------


SIZES = {"hidden_size": 128, "intermediate_size": 256, "num_attention_heads": 4, "head_dim": 32}


@needs_library
def test_numbers_are_within_half_a_step_of_their_block() -> None:
    weight = torch.randn(700, 192).bfloat16()
    weight[3, 32:64] = 0.0
    weight[4, :32] *= 1e-4
    found = BlockWeight([Blocks(quantize_q8_0(weight), 8)], 192).dequantize().float()
    steps = weight.float().view(700, -1, 32).abs().amax(dim=2, keepdim=True) / 127
    errors = (found - weight.float()).view(700, -1, 32).abs()
    # Half a step, rounding of the step to float16 (2^-25 where it is subnormal), and of the product to bfloat16.
    assert bool(
        (errors <= steps * 0.5 + weight.float().view_as(errors).abs() * (2**-11 + 2**-8) + 127 * 2**-25).all()
    )
    assert not found[3, 32:64].any()


def test_nothing_is_compiled_for_weights_that_stay_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choose, "library", lambda: pytest.fail("gcc runs"))
    cpu = torch.device("cpu")
    of_ranks = EngineConfig(dtype="bfloat16", tp=2)
    assert choose.block_conversion(DummyWeights(torch.bfloat16, cpu), of_ranks, torch.bfloat16, cpu) is None


@needs_library
def test_columns_that_fill_no_block_stay_in_rows() -> None:
    made = BlockLinears(torch.bfloat16)
    weight = torch.randn(64, 48).bfloat16()
    assert made.of_plain(Linear(weight)).gemm is int8
    wide = made.of_plain(Linear(torch.randn(64, 96).bfloat16(), torch.randn(64).bfloat16()))
    assert isinstance(wide.gemm, BlockGemm)


@needs_library
@pytest.mark.parametrize("name", ["llama", "qwen3-moe"])
def test_a_models_layers_hold_blocks_alone_and_are_closer_than_with_a_scale_a_row(name: str, tmp_path: Path) -> None:
    tiny = TINY_MODELS[name]
    path = TinyModel(tiny.family, {**tiny.changes, **SIZES}).save(tmp_path / "m")
    exact, _ = open_model(directory(path), dtype="float32", quant_mode="none")
    blocks, _ = open_model(directory(path), dtype="bfloat16")
    rows, _ = open_model(directory(path), dtype="bfloat16", quant_mode="int8-weight")
    assert (blocks.quant_mode, rows.quant_mode) == ("q8_0", "int8-weight")
    x = torch.randn(5, 128).bfloat16()
    sums = [0.0, 0.0]
    layers = zip(exact.model.linears(), blocks.model.linears(), rows.model.linears(), strict=True)
    for plain, block, row in ((a.layer, b.layer, c.layer) for a, b, c in layers):
        if not isinstance(block.gemm, BlockGemm):  # logits in float16
            continue
        assert block.dense is None or isinstance(block.dense.gemm, BlockGemm)
        inputs = x if block.num_columns == 128 else torch.randn(5, block.num_columns).bfloat16()
        expected = plain(inputs.float())
        assert within(block(inputs), expected, 0.02)
        for index, layer in enumerate((block, row)):
            sums[index] += float((layer(inputs).float() - expected).square().sum())
    assert 0.0 < sums[0] < sums[1]


# -- experts in one call: the same bits as one after the other -------------------------------------------------------


NUM_EXPERTS, TOP_K, HIDDEN, INNER, MAX_ROWS = 7, 3, 512, 256, 6


def some_experts(
    max_rows: int = MAX_ROWS, last: GGMLQuantizationType = Kind.Q6_K, is_clamped: bool = False
) -> dict[int, Expert]:
    """Make experts of two alternating types, without experts 2 and 6. is_clamped: gpt-oss' gate, with biases."""
    experts: dict[int, Expert] = {}
    for index in (0, 1, 3, 4, 5):
        down = last if index % 2 else Kind.Q4_K
        parts = [some_blocks(kind, INNER, HIDDEN)[0] for kind in (Kind.Q4_K, Kind.Q5_K)]
        gate_up = BlockWeight(parts, HIDDEN)
        of_down = BlockWeight([some_blocks(down, HIDDEN, INNER)[0]], INNER)
        biases = [torch.randn(count).bfloat16() if is_clamped else None for count in (2 * INNER, HIDDEN)]
        layers = block_linear(gate_up, biases[0], max_rows), block_linear(of_down, biases[1], max_rows)
        experts[index] = ClampedExpert(*layers, 1.702, 7.0) if is_clamped else Expert(*layers)
    return experts


def choices(num_tokens: int) -> tuple[Tensor, Tensor, Tensor]:
    x = torch.randn(num_tokens, HIDDEN).bfloat16()
    chosen = torch.stack([torch.randperm(NUM_EXPERTS)[:TOP_K] for _ in range(num_tokens)])
    chosen[::4, 1] = -1
    return x, torch.rand(num_tokens, TOP_K), chosen


def at_once_of(experts: dict[int, Expert]) -> BlockExperts | None:
    linears = {index: (each.gate_up, each.down) for index, each in experts.items()}
    return BlockGemm.together(linears, *experts[0].gate)


def one_after_the_other(experts: dict[int, Expert], x: Tensor, shares: Tensor, chosen: Tensor) -> Tensor:
    block = SimpleNamespace(experts=experts, _together=None)
    return Moe.chosen_output(block, x, shares, chosen)  # type: ignore[arg-type]


@needs_library
@pytest.mark.usefixtures("_variant")
@pytest.mark.parametrize("num_tokens", [1, 2, 5])
@pytest.mark.parametrize(("max_rows", "is_clamped"), [(MAX_ROWS, False), (0, False), (MAX_ROWS, True)])
def test_bits_are_those_of_one_after_the_other(num_tokens: int, max_rows: int, is_clamped: bool) -> None:
    experts = some_experts(max_rows, is_clamped=is_clamped)
    at_once = at_once_of(experts)
    assert at_once is not None
    for _ in range(3):
        x, shares, chosen = choices(num_tokens)
        found = at_once(x, shares, chosen)
        assert found is not None
        assert torch.equal(found, one_after_the_other(experts, x, shares, chosen))


@needs_library
@pytest.mark.usefixtures("_variant")
def test_what_is_left_to_one_after_the_other() -> None:
    """An expert with too many tokens for the integer product, and weights that have none."""
    at_once = at_once_of(some_experts())
    assert at_once is not None
    x, shares, _ = choices(MAX_ROWS + 1)
    assert at_once(x, shares, torch.ones(MAX_ROWS + 1, TOP_K, dtype=torch.int64)) is None
    nobody = at_once(x, shares, torch.full((MAX_ROWS + 1, TOP_K), -1))
    assert nobody is not None
    assert not nobody.any()
    assert at_once_of(some_experts(last=Kind.Q2_K)) is None


@needs_library
def test_steps_of_a_model_have_its_experts_at_once(tmp_path: Path) -> None:
    """Only steps of generated tokens; prompts compute in bfloat16, one expert after the other."""
    sizes = {"moe_intermediate_size": 256, "num_experts": 4, "num_experts_per_tok": 2, "norm_topk_prob": True}
    files = write_wide(tmp_path, "Q8_0", "Qwen3Moe", head_dim=32, **sizes)
    prompt = random_prompt(20, VOCAB_SIZE, 3)

    def logits(num_tokens: int) -> Tensor:
        loaded, config = open_model(files, dtype="bfloat16")
        return generate(loaded, config, prompt, num_tokens, chunk=20)[1]

    with patch.object(BlockExperts, "__call__", autospec=True, side_effect=BlockExperts.__call__) as called:
        logits(1)
        assert not called.called
        at_once = logits(4)
        assert called.call_count == 3
    with patch.object(BlockGemm, "together", return_value=None):
        assert torch.equal(logits(4), at_once)
