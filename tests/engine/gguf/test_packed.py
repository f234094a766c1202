"""Layers over blocks as a GGUF file holds them: each type in both forms, and a model that keeps them."""

from __future__ import annotations

import logging
import shutil
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

from common.model_files import ModelFiles
from engine.gguf.packed import block_linear
from kernels.gguf import linear
from kernels.gguf.library import FOLDER, declared, library
from kernels.gguf.linear import BLOCK_COLUMNS, Blocks, BlockWeight
from kernels.native.compile import AVX512, VARIANTS, Variant, library_path
from kernels.native.library import loaded, variants_of_this_cpu
from tests.engine.driving import open_model, random_prompt, read_prompt
from tests.engine.gguf.gguf_files import write_gguf
from tests.engine.gguf.test_gguf import WIDE
from tests.engine.tiny_models import VOCAB_SIZE, TinyModel

Kind = GGMLQuantizationType
KINDS = sorted(map(GGMLQuantizationType, BLOCK_COLUMNS))
HALVES = {  # where a block has its float16 numbers
    Kind.Q4_0: (0,), Kind.Q4_1: (0, 2), Kind.Q5_0: (0,), Kind.Q5_1: (0, 2), Kind.Q8_0: (0,), Kind.Q2_K: (80, 82),
    Kind.Q3_K: (108,), Kind.Q4_K: (0, 2), Kind.Q5_K: (0, 2), Kind.Q6_K: (208,),
}  # fmt: skip
IN_INTEGERS = set(KINDS) - {Kind.Q5_1, Kind.Q2_K, Kind.Q3_K}

needs_library = pytest.mark.skipif(
    shutil.which("gcc") is None or next(variants_of_this_cpu(), None) is None,
    reason="this CPU has no AVX2, or no gcc",
)


@pytest.fixture(params=VARIANTS, ids=["avx512", "avx2"])
def _variant(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights that are made in the test are computed with by this variant."""
    if request.param not in variants_of_this_cpu():
        pytest.skip("this CPU lacks its instructions")
    monkeypatch.setattr(linear, "library", lambda: declared(loaded(FOLDER, request.param)))


def random_blocks(kind: GGMLQuantizationType, num_rows: int, num_columns: int) -> tuple[Blocks, torch.Tensor]:
    """Rows of random bits under sane scales, and the float32 numbers that the `gguf` package reads in them."""
    rng = np.random.default_rng(int(kind))
    block_size, block_bytes = GGML_QUANT_SIZES[kind]
    raw = rng.integers(0, 256, (num_rows, num_columns // block_size, block_bytes), dtype=np.uint8)
    if kind == Kind.MXFP4:
        raw[:, :, 0] = rng.integers(117, 122, raw.shape[:2])
    for at in HALVES.get(kind, ()):
        scales = rng.normal(0, 0.01, raw.shape[:2]).astype(np.float16)
        raw[:, :, at : at + 2] = scales[..., None].view(np.uint8)
    flat = raw.reshape(num_rows, -1)
    return Blocks(torch.from_numpy(flat), int(kind)), torch.from_numpy(gguf.dequantize(flat, kind))


def within(found: torch.Tensor, exact: torch.Tensor, most: float) -> bool:
    """Whether errors are small beside what is added up."""
    return float((found.float() - exact).abs().max()) <= most * float(exact.abs().max())


@needs_library
@pytest.mark.usefixtures("_variant")
@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_weights_are_dequantized_to_the_bit(kind: GGMLQuantizationType) -> None:
    blocks, exact = random_blocks(kind, 37, 512)
    assert GGML_QUANT_SIZES[kind][0] == BLOCK_COLUMNS[kind]
    assert torch.equal(BlockWeight([blocks], 512).dequantize(), exact.bfloat16())


@needs_library
@pytest.mark.usefixtures("_variant")
@pytest.mark.parametrize("num_columns", [512, 768])
@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_products(kind: GGMLQuantizationType, num_columns: int) -> None:
    """In integers, where nothing but x is rounded, and in bfloat16; rows and columns that fill no vector."""
    blocks, exact = random_blocks(kind, 37, num_columns)
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
    """In integers, two blocks share an accumulator."""
    blocks, exact = random_blocks(kind, 37, 96)
    weight = BlockWeight([blocks], 96)
    assert not weight.has_integers
    layer = block_linear(weight, None, 12)
    x = torch.randn(5, 96).bfloat16()
    assert layer.dense is None
    assert within(layer(x), x.float() @ exact.T, 0.01)


@needs_library
@pytest.mark.usefixtures("_variant")
def test_x_of_zeros_gives_the_bias() -> None:
    blocks, _ = random_blocks(Kind.Q4_K, 20, 256)
    bias = torch.randn(20).bfloat16()
    for in_integers in (False, True):
        found = BlockWeight([blocks], 256).linear(torch.zeros(3, 256), bias, torch.float32, in_integers)
        assert torch.equal(found, bias.float().expand(3, -1))


@needs_library
@pytest.mark.usefixtures("_variant")
@pytest.mark.parametrize("in_integers", [False, True])
def test_a_row_has_the_same_bits_among_any_others(in_integers: bool) -> None:
    """Of several types in one layer, as q, k and v are."""
    kinds = ((Kind.Q5_0, 48), (Kind.Q4_1, 20), (Kind.Q6_K, 33), (Kind.Q8_0, 19), (Kind.Q4_K, 18), (Kind.Q5_K, 17))
    parts = [random_blocks(kind, rows, 256)[0] for kind, rows in kinds]
    weight = BlockWeight(parts, 256)
    x = torch.randn(27, 256).bfloat16()
    together = weight.linear(x, None, torch.bfloat16, in_integers)
    assert together.shape == (27, 155)
    for first, last in ((0, 1), (1, 3), (3, 11), (20, 27)):
        assert torch.equal(weight.linear(x[first:last], None, torch.bfloat16, in_integers), together[first:last])


@needs_library
def test_a_layer_chooses_by_rows_of_x() -> None:
    blocks, exact = random_blocks(Kind.Q4_K, 64, 256)
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
    path = tmp_path / "m.gguf"
    write_gguf(path, TinyModel("Llama", WIDE).build(), "llama", quantization)
    files = ModelFiles("m", "gguf", path)
    prompt = random_prompt(40, VOCAB_SIZE, 3)
    found = {}
    for mode, dtype in (("none", "float32"), ("int8-weight", "bfloat16"), ("auto", "bfloat16")):
        loaded, config = open_model(files, dtype=dtype, quant_mode=mode)
        found[mode] = torch.tensor([entry.logprob for entry in read_prompt(loaded, config, prompt, chunk=1)])
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
    path = tmp_path / "m.gguf"
    write_gguf(path, TinyModel("Qwen2", WIDE).build(), "qwen2", "Q8_0")
    loaded, _ = open_model(ModelFiles("m", "gguf", path), dtype="bfloat16")
    mapped = [
        line.split("-") for line in Path("/proc/self/maps").read_text().splitlines() if line.endswith(str(path))
    ]
    ranges = [range(int(start, 16), int(rest.split()[0], 16)) for start, rest, *_ in mapped]
    for ref in loaded.model.linears():
        assert any(ref.layer.weight.data_ptr() in addresses for addresses in ranges), ref.name


@needs_library
@pytest.mark.parametrize("variant", VARIANTS, ids=["avx512", "avx2"])
def test_the_library_is_compiled_once(variant: Variant, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also for another CPU, as images have it, for which no other test compiles the sources."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    folder = FOLDER
    if variant in variants_of_this_cpu():
        folder = tmp_path / "sources"
        folder.mkdir()
        (folder / "one.c").write_text("int one(void) { return 1; }\n")
    made = library_path(folder, variant)
    assert made.is_relative_to(tmp_path)
    written = made.stat().st_mtime_ns
    assert library_path(folder, variant) == made
    assert made.stat().st_mtime_ns == written
    assert [path.name for path in made.parent.iterdir()] == [made.name]
