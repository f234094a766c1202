"""Experts stored as MXFP4 in a GGUF file, dequantized and in the layout of expert kernels."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from common.model_files import ModelFiles, resolve_model
from engine.config import EngineConfig
from engine.gguf.config import adapted_config
from engine.gguf.mxfp4 import weights_of
from engine.gguf.packed import BlockGemm
from engine.gguf.weights import GgufFile
from engine.layers.linear import Linear
from engine.loader.load import load_model
from engine.models.families import family_of
from engine.models.model import Model
from engine.moe.moe import Moe
from engine.quantization.cpu_linears import int8
from engine.quantization.mxfp4 import Mxfp4Source, dequantize
from kvstore.layout import Shard
from tests.engine.driving import directory, generate, open_model, random_prompt
from tests.engine.gguf.gguf_files import write_gguf
from tests.engine.gguf.test_gguf import FAMILIES, GPT_OSS_GIVEN, check_against_transformers
from tests.engine.gguf.test_packed import needs_library, within
from tests.engine.quantization.published_experts import write_mxfp4
from tests.engine.tiny_models import GPT_OSS, VOCAB_SIZE, TinyModel


def experts_of(model: Model) -> dict[tuple[int, int, str], Linear]:
    """Return the layers of experts by block, expert and name."""
    blocks = [(number, block) for number, block in enumerate(model.blocks) if isinstance(block, Moe)]
    return {
        (number, index, name): getattr(expert, name)
        for number, block in blocks
        for index, expert in block.experts.items()
        for name in ("gate_up", "down")
    }


def test_experts_in_mxfp4_equal_transformers(tmp_path: Path) -> None:
    check_against_transformers(tmp_path / "m.gguf", FAMILIES["gpt-oss"][0], "gpt-oss", "MXFP4")


def test_blocks_are_read_as_a_checkpoints(tmp_path: Path) -> None:
    tiny = TinyModel("GptOss", {**GPT_OSS, "hidden_size": 64, "intermediate_size": 96})
    write_gguf(tmp_path / "m.gguf", tiny.build(), "gpt-oss", "MXFP4")
    file = GgufFile(tmp_path / "m.gguf")
    config = adapted_config(file, family_of("GptOssForCausalLM"))
    weights = weights_of(file, config, False, torch.float32, torch.device("cpu"))
    assert isinstance(weights, Mxfp4Source)
    layer = "model.layers.1.mlp.experts."
    assert not weights.is_packed(f"{layer}down_proj_bias")
    parts = {
        "gate_up_proj": (range(6), range(192), range(2)),
        "down_proj": (range(2, 4), range(8, 40), range(1, 3)),
    }
    for name, (experts, rows, groups) in parts.items():
        assert weights.is_packed(layer + name)
        blocks, scales = weights.read(layer + name, experts, rows, groups)
        expected = weights.take_part(layer + name, (experts, range(groups.start * 32, groups.stop * 32), rows))
        assert torch.equal(dequantize(blocks, scales, torch.float32), expected)


@needs_library
@pytest.mark.parametrize("quantization", ["MXFP4", "Q8_0"])
def test_experts_stay_as_the_file_holds_them_on_cpus(quantization: str, tmp_path: Path) -> None:
    """For few tokens and many; a whole model computes the same as its layers."""
    path = tmp_path / "m.gguf"
    sizes = {"hidden_size": 128, "intermediate_size": 128, "num_attention_heads": 4, "head_dim": 32}
    write_gguf(path, TinyModel("GptOss", {**GPT_OSS, **GPT_OSS_GIVEN, **sizes}).build(), "gpt-oss", quantization)
    exact, _ = open_model(ModelFiles("m", "gguf", path), dtype="float32", quant_mode="none")
    loaded, config = open_model(ModelFiles("m", "gguf", path), dtype="bfloat16")
    assert loaded.quant_mode == "gguf"
    experts = experts_of(loaded.model)
    assert experts
    for key, expected in experts_of(exact.model).items():
        layer = experts[key]
        assert isinstance(layer.gemm, BlockGemm)
        for num_tokens in (3, 40):
            x = torch.randn(num_tokens, 128).bfloat16()
            assert within(layer(x), expected(x.float()), 0.01)
    assert generate(loaded, config, random_prompt(24, VOCAB_SIZE, 3), 3, chunk=24)[1].isfinite().all()


@needs_library
def test_experts_of_a_checkpoint_become_the_blocks_of_a_file(tmp_path: Path) -> None:
    """Bit by bit; `test_published.py` compares logits."""
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "head_dim": 32}
    model = write_mxfp4(tmp_path / "m", TinyModel("GptOss", {**GPT_OSS, **GPT_OSS_GIVEN, **sizes}))
    loaded, _ = open_model(directory(tmp_path / "m"), dtype="bfloat16")
    assert loaded.quant_mode == "mxfp4"
    blocks = [block for block in loaded.model.blocks if isinstance(block, Moe)]
    for block, stored in zip(blocks, model.model.layers, strict=True):
        for index, expert in block.experts.items():
            both, down = stored.mlp.experts.gate_up_proj[index].T, stored.mlp.experts.down_proj[index].T
            for layer, expected in ((expert.gate_up, torch.cat([both[::2], both[1::2]])), (expert.down, down)):
                assert isinstance(layer.gemm, BlockGemm)
                assert torch.equal(layer.gemm.weight.dequantize().float(), expected.float())


@needs_library
@pytest.mark.parametrize("kind", ["gguf", "checkpoint"])
def test_ranks_divide_experts_in_blocks(kind: str, tmp_path: Path) -> None:
    """Ranks take whole blocks of columns; a rank with half a block has it in int8."""
    path = tmp_path / ("m.gguf" if kind == "gguf" else "m")
    sizes = {"hidden_size": 64, "intermediate_size": 64, "num_attention_heads": 4, "num_key_value_heads": 4}
    tiny = TinyModel("GptOss", {**GPT_OSS, **GPT_OSS_GIVEN, **sizes})
    if kind == "gguf":
        write_gguf(path, tiny.build(), "gpt-oss", "MXFP4")
    else:
        write_mxfp4(path, tiny)

    def experts(rank: int, num_ranks: int) -> dict[tuple[int, int, str], Linear]:
        config = EngineConfig(str(path), device="cpu", dtype="bfloat16", tp=num_ranks)
        loaded = load_model(resolve_model(str(path)), config, torch.device("cpu"), Shard(rank, num_ranks))
        return experts_of(loaded.model)

    def weight(layer: Linear) -> Tensor:
        assert isinstance(layer.gemm, BlockGemm)
        return layer.gemm.weight.dequantize()

    halves = [experts(rank, 2) for rank in range(2)]
    for key, layer in experts(0, 1).items():
        first, second = (weight(half[key]) for half in halves)
        if key[-1] == "gate_up":
            made = torch.cat([first.view(2, -1, 64), second.view(2, -1, 64)], dim=1).flatten(0, 1)
        else:
            made = torch.cat([first, second], dim=1)
        assert torch.equal(made, weight(layer))
    for key, layer in experts(1, 4).items():
        if key[-1] == "down":
            assert layer.gemm is int8
            x, own = torch.randn(3, 16).bfloat16(), weight(experts(0, 1)[key])[:, 16:32]
            assert within(layer(x), x.float() @ own.float().T, 0.02)
