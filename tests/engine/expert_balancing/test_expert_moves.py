"""Experts that ranks exchange: afterwards each rank holds the weights that loading would have given it."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from common.errors import ConfigError
from engine.cpu_forms.forms import dense
from engine.dummy_weights.weights import DummyWeights
from engine.expert_balancing.moves import ExpertRearranger, linear_experts, moves_between
from engine.models.config import ModelConfig, RopeConfig
from engine.moe.config import MoeConfig
from engine.moe.moe import Moe
from engine.moe.stacked_moe import StackedMoe
from engine.plan import PlacedExperts
from engine.quantization.cpu_linears import CpuLinears, int8
from engine.quantization.int4 import quantize_int4
from tests.engine.threaded_ranks import ThreadGroup

SIZE, HIDDEN, CPU = 3, 32, torch.device("cpu")
CONFIG = ModelConfig(
    architecture="Qwen3MoeForCausalLM", vocab_size=1, hidden_size=HIDDEN, num_layers=1, num_heads=1, num_kv_heads=1,
    head_dim=2, intermediate_size=1, rms_norm_eps=1e-6, rope=RopeConfig(), max_position_embeddings=1,
    moe=MoeConfig(6, 3, 32, swiglu_alpha=1.7, swiglu_limit=7.0),
)  # fmt: skip
FIRST = (0, 1, 2, 3, 4, 5, 0, 2, 4)
LATER = [(5, 1, 2, 3, 0, 4, 5, 2, 4), (1, 0, 5, 2, 3, 4, 5, 1, 0), FIRST, (2, 1, 0, 3, 5, 4, 4, 0, 1)]


def make_block(
    kind: type[Moe], dtype: torch.dtype, is_int8: bool, rank: int, slots: tuple[int, ...], copies_dense: bool
) -> Moe:
    assert CONFIG.moe is not None
    moe = replace(CONFIG.moe, slots=slots, expert_rank=rank, expert_ranks=SIZE)
    block = kind(replace(CONFIG, moe=moe), DummyWeights(dtype, CPU, std=0.2), "mlp", "norm")
    for ref in block.linears() if is_int8 else ():
        ref.replace(CpuLinears(dtype).of_plain(ref.layer))
        assert ref.layer.gemm is int8
    return with_dense(block) if copies_dense else block


def with_dense(block: Moe) -> Moe:
    copied = block.copy()
    for ref in copied.linears():
        ref.replace(dense(ref.layer))
    return copied


def output(block: Moe, x: Tensor) -> Tensor:
    return block.chosen_output(x, *block.route(x))


@pytest.mark.parametrize(
    ("kind", "dtype", "is_int8"),
    [(Moe, torch.float32, False), (Moe, torch.bfloat16, True), (StackedMoe, torch.float32, False)],
)
@torch.inference_mode()
def test_a_moved_expert_is_as_it_would_have_been_loaded(kind: type[Moe], dtype: torch.dtype, is_int8: bool) -> None:
    """Also in lowered forms that were made before the move; between ranks, within one, and back."""
    group, x = ThreadGroup(SIZE), torch.randn(24, HIDDEN, generator=torch.Generator().manual_seed(5)).to(dtype)

    def run(rank: int) -> int:
        group.join(rank)
        with torch.inference_mode():
            block = make_block(kind, dtype, is_int8, rank, FIRST, False)
            lowered = with_dense(block)
            rearranger = ExpertRearranger(linear_experts([block]), group)
            for slots in LATER:
                rearranger.place(PlacedExperts(0, slots))
                for form, is_dense in ((block, False), (lowered, True)):
                    fresh = make_block(kind, dtype, is_int8, rank, slots, is_dense)
                    for rows in (x[:2], x):
                        assert torch.equal(output(form, rows), output(fresh, rows))
        return rank

    with ThreadPoolExecutor(SIZE) as executor:
        assert list(executor.map(run, range(SIZE))) == [0, 1, 2]


def test_a_slot_takes_its_expert_from_its_own_rank_if_it_can() -> None:
    moves = moves_between((0, 1, 2, 0), (1, 0, 1, 2), 2)
    assert [(move.source, move.target) for move in moves] == [(1, 0), (0, 1), (1, 2), (2, 3)]


def test_experts_that_cannot_be_moved_are_refused() -> None:
    block = make_block(Moe, torch.bfloat16, False, 0, FIRST, False)
    for ref in block.linears():
        made = CpuLinears(torch.bfloat16).of_rows(quantize_int4(ref.layer.weight), None)
        assert made is not None
        ref.replace(made[0])
    with pytest.raises(ConfigError, match="plain and int8 experts alone"):
        linear_experts([block])
