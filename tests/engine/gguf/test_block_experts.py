"""Experts of GGUF files whose weights stay as they are, in one call: the same bits as one after the other."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from unittest.mock import patch

import pytest
import torch
from gguf.constants import GGMLQuantizationType
from torch import Tensor

from common.model_files import ModelFiles
from engine.gguf.packed import BlockGemm, block_linear
from engine.moe.moe import Expert, Moe
from engine.moe.stacked_moe import ClampedExpert
from kernels.gguf.experts import BlockExperts
from kernels.gguf.linear import BlockWeight
from tests.engine.driving import Driver, make_runner, open_model, random_prompt
from tests.engine.gguf.gguf_files import write_gguf
from tests.engine.gguf.test_gguf import WIDE
from tests.engine.gguf.test_packed import _variant, needs_library, random_blocks
from tests.engine.tiny_models import VOCAB_SIZE, TinyModel

Kind = GGMLQuantizationType
NUM_EXPERTS, TOP_K, HIDDEN, INNER, MAX_ROWS = 7, 3, 512, 256, 6

pytestmark = needs_library
__all__ = ["_variant"]


def some_experts(
    max_rows: int = MAX_ROWS, last: GGMLQuantizationType = Kind.Q6_K, is_clamped: bool = False
) -> dict[int, Expert]:
    """Of two types in turn, without numbers 2 and, at the end, 6. is_clamped: gpt-oss' gate, with biases."""
    experts: dict[int, Expert] = {}
    for index in (0, 1, 3, 4, 5):
        down = last if index % 2 else Kind.Q4_K
        parts = [random_blocks(kind, INNER, HIDDEN)[0] for kind in (Kind.Q4_K, Kind.Q5_K)]
        gate_up = BlockWeight(parts, HIDDEN)
        of_down = BlockWeight([random_blocks(down, HIDDEN, INNER)[0]], INNER)
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


@pytest.mark.usefixtures("_variant")
def test_what_is_left_to_one_after_the_other() -> None:
    """An expert with more tokens than compute in integers, and weights that cannot."""
    at_once = at_once_of(some_experts())
    assert at_once is not None
    x, shares, _ = choices(MAX_ROWS + 1)
    assert at_once(x, shares, torch.ones(MAX_ROWS + 1, TOP_K, dtype=torch.int64)) is None
    nobody = at_once(x, shares, torch.full((MAX_ROWS + 1, TOP_K), -1))
    assert nobody is not None
    assert not nobody.any()
    assert at_once_of(some_experts(last=Kind.Q2_K)) is None


def test_steps_of_a_model_have_its_experts_at_once(tmp_path: Path) -> None:
    """Those of generated tokens: a prompt's compute in bfloat16, one expert after the other."""
    path = tmp_path / "m.gguf"
    sizes = {"moe_intermediate_size": 256, "num_experts": 4, "num_experts_per_tok": 2, "norm_topk_prob": True}
    write_gguf(path, TinyModel("Qwen3Moe", {**WIDE, "head_dim": 32, **sizes}).build(), "qwen3moe", "Q8_0")
    prompt = random_prompt(20, VOCAB_SIZE, 3)

    def logits(num_tokens: int) -> list[Tensor]:
        loaded, config = open_model(ModelFiles("m", "gguf", path), dtype="bfloat16")
        driver = Driver(make_runner(loaded, config), config)
        request = driver.add(prompt, record_logits=True)
        driver.finish([request], num_tokens, chunk=20)
        return driver.logits[request.request_id]

    with patch.object(BlockExperts, "__call__", autospec=True, side_effect=BlockExperts.__call__) as called:
        logits(1)
        assert not called.called
        at_once = logits(4)
        assert called.call_count == 3
    with patch.object(BlockGemm, "together", return_value=None):
        assert all(map(torch.equal, logits(4), at_once))
