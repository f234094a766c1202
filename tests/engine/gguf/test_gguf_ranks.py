"""Tensor-parallel ranks hold parts of a GGUF file's 4-bit blocks: the same numbers in less memory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from common.model_files import resolve_model
from engine.config import EngineConfig
from engine.gguf.packed import BlockGemm
from engine.loader.load import load_model
from engine.quantization import conversion
from engine.quantization.cpu_linears import int4, int8
from kvstore.layout import Shard
from tests.engine.driving import prompt_logprobs
from tests.engine.gguf.gguf_files import write_gguf, write_wide
from tests.engine.gguf.test_gguf import FAMILIES
from tests.engine.gguf.test_packed import needs_library
from tests.engine.quantization.test_packed_ranks import ExactLinears
from tests.engine.threaded_ranks import CPU, PROMPTS, answers_of, open_ranks, open_stages
from tests.engine.tiny_models import VOCAB_SIZE

pytestmark = pytest.mark.slow
MODELS: dict[str, dict[str, Any]] = {
    "llama": {"num_hidden_layers": 2},  # whose rows of q and k are permuted
    "tied and odd vocabulary": {"vocab_size": VOCAB_SIZE + 1, "tie_word_embeddings": True},
    "blocks cut in two": {"intermediate_size": 192},  # 48 columns of each of four ranks
}


def write(path: Path, name: str) -> Path:
    return write_wide(path, "Q4_1", **MODELS[name]).path


@pytest.fixture
def _exact(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make layers of 4-bit rows compute in float32, without rounding; others stay plain."""

    monkeypatch.setattr(conversion, "resolve_quant_mode", lambda *_, **options: "int4-weight")
    monkeypatch.setattr(conversion, "linears_of", lambda dtype, _device: ExactLinears(dtype))


@pytest.mark.usefixtures("_exact")
@pytest.mark.parametrize("name", MODELS)
def test_ranks_and_stages_equal_one_rank(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With 4 ranks, two have the same KV head."""
    path = write(tmp_path, name)
    expected = answers_of(open_ranks(path, 1, monkeypatch))
    for num_ranks in (2, 4):
        parts = open_ranks(path, num_ranks, monkeypatch)
        assert parts.loaded.quant_mode == "int4-weight"
        assert answers_of(parts) == expected
    if MODELS[name].get("num_hidden_layers") == 2:
        assert answers_of(open_stages(path, 2, monkeypatch, 2)) == expected


@pytest.mark.parametrize("name", ["deepseek-v3", "gpt-oss", "qwen2moe"])
def test_ranks_of_made_weights_equal_one_rank(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tiny, arch = FAMILIES[name]
    write_gguf(tmp_path / "m.gguf", tiny.build(), arch)
    expected = answers_of(open_ranks(tmp_path / "m.gguf", 1, monkeypatch))
    assert answers_of(open_ranks(tmp_path / "m.gguf", 2, monkeypatch)) == expected


@pytest.mark.parametrize("quant_mode", ["int4-weight", pytest.param("auto", marks=needs_library)])
@pytest.mark.parametrize(("name", "num_ranks"), [("llama", 2), ("blocks cut in two", 2), ("blocks cut in two", 4)])
def test_ranks_keep_blocks_that_they_do_not_cut(quant_mode: str, name: str, num_ranks: int, tmp_path: Path) -> None:
    path = write(tmp_path, name)
    config = EngineConfig(str(path), device="cpu", dtype="bfloat16", tp=num_ranks, quant_mode=quant_mode)
    for rank in range(num_ranks):
        for ref in load_model(resolve_model(str(path)), config, CPU, Shard(rank, num_ranks)).model.linears():
            if ref.attribute == "down" and num_ranks == 4:
                assert ref.layer.gemm is int8
            elif quant_mode == "auto":
                assert isinstance(ref.layer.gemm, BlockGemm)
            elif ref.attribute != "head":
                assert ref.layer.gemm is int4


def test_ranks_are_close_to_one_rank_in_bfloat16(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are not equal, because sums over ranks are rounded once more."""
    path = write(tmp_path, "llama")
    found = [
        prompt_logprobs(open_ranks(path, num_ranks, monkeypatch, dtype="bfloat16").engine, PROMPTS)
        for num_ranks in (1, 2)
    ]
    assert 0 < float((found[0] - found[1]).abs().mean()) < 0.05
