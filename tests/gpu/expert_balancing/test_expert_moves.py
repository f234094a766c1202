"""Experts that ranks exchange in a GPU's stacks: each rank then has what it would have loaded."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
import torch

from engine.dummy_weights.weights import DummyWeights
from engine.expert_balancing.gpu_moves import StackedLayer
from engine.expert_balancing.moves import ExpertRearranger, moving_bytes
from engine.moe.expert_stacks import StackedExperts, prepare, stacked_of
from engine.moe.moe import Moe
from engine.moe.stacked_moe import StackedMoe
from engine.plan import PlacedExperts
from engine.quantization.gpu_linears import FP8, stored, w4a16
from engine.quantization.quantized_rows import FP8_DTYPE
from kernels.gpu.few_rows.split_k import SplitKWorkspace
from tests.engine.expert_balancing.test_expert_moves import CONFIG, FIRST, LATER, SIZE
from tests.engine.threaded_ranks import ThreadGroup
from tests.gpu.moe.test_experts import DEVICE, Kind, quantize

HIDDEN, SHARED = 128, 1


def make_block(made_of: type[Moe], rank: int, slots: tuple[int, ...], kind: Kind | None) -> Moe:
    """Make a rank's block; an expert has the same weights on all ranks."""
    assert CONFIG.moe is not None
    moe = replace(
        CONFIG.moe, slots=slots, expert_rank=rank, expert_ranks=SIZE, intermediate_size=HIDDEN, exchange="dispatch",
        num_shared_experts=0 if made_of is StackedMoe else SHARED,
    )  # fmt: skip
    config = replace(CONFIG, moe=moe, hidden_size=HIDDEN)
    block = made_of(config, DummyWeights(torch.float32, DEVICE, std=0.2), "mlp", "norm")
    if kind is not None:
        quantize_alike(block, kind)
    return block


def quantize_alike(block: Moe, kind: Kind) -> None:
    """Quantize; if that draws random weights, the same ones for the same expert."""
    if kind is FP8:  # any scales will do, and kernels that compute them are slow when interpreted
        for ref in block.linears():
            weight = ref.layer.weight
            ref.replace(FP8.linear(weight.to(FP8_DTYPE), weight.amax(dim=1), None, SplitKWorkspace(DEVICE)))
        return
    experts, shared = block.experts, block.shared
    for slot, expert in experts.items():
        block.experts, block.shared = {slot: expert}, None
        torch.manual_seed(block.rule.expert_of(slot))
        quantize(block, kind)
    block.experts, block.shared = {}, shared
    quantize(block, kind)
    block.experts = experts


@pytest.mark.parametrize(
    ("made_of", "kind"),
    [(Moe, None), (Moe, FP8), (Moe, w4a16), (StackedMoe, stored), (StackedMoe, None)],
)
def test_a_moved_expert_is_as_it_would_have_been_loaded(made_of: type[Moe], kind: Kind | None) -> None:
    """Weights, scales and biases move within the memory that graphs use; shared experts stay."""
    group = ThreadGroup(SIZE)

    def run(rank: int) -> int:
        group.join(rank)
        layer = StackedLayer(block := blocks[rank][FIRST])
        rearranger = ExpertRearranger([layer], group)
        stacks = stacked_of(block)
        addresses = [each.data_ptr() for each in tensors_of(stacks)]
        assert moving_bytes([layer], rank, SIZE) == 2 * sum(
            len(FIRST) // SIZE * each[0].nbytes for each in tensors_of(stacks)
        )
        for slots in LATER:
            rearranger.place(PlacedExperts(0, slots))
            fresh = blocks[rank][slots]
            prepare(fresh)
            for own, other in zip(tensors_of(stacks), tensors_of(stacked_of(fresh)), strict=True):
                assert torch.equal(own.view(torch.uint8), other.view(torch.uint8))
            assert block.slots is not None
            assert fresh.slots is not None
            assert torch.equal(block.slots.table, fresh.slots.table)
            assert torch.equal(block.slots.counts, fresh.slots.counts)
        assert addresses == [each.data_ptr() for each in tensors_of(stacks)]
        return rank

    blocks = [{slots: make_block(made_of, rank, slots, kind) for slots in (FIRST, *LATER)} for rank in range(SIZE)]
    with ThreadPoolExecutor(SIZE) as executor:
        assert list(executor.map(run, range(SIZE))) == [0, 1, 2]


def tensors_of(experts: StackedExperts) -> list[torch.Tensor]:
    of_stacks = [(stack.weight, stack.scales, stack.bias) for stack in (experts.gate_up, experts.down)]
    return [each for stack in of_stacks for each in stack if each is not None]
