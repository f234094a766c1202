"""Grouped GEMMs of experts of 4 bits on Hopper, which the interpreter does not know, and what they take."""

from __future__ import annotations

import pytest
import torch

from kernels.elementwise import silu_mul
from kernels.gpu.moe import expert_tuning as tuning
from kernels.gpu.moe import packed_experts as packed_experts_module
from kernels.gpu.moe.expert_pairs import sort_pairs
from kernels.gpu.moe.expert_tuning import ExpertTile
from kernels.gpu.moe.packed_experts import packed_experts, takes_packed, tile_of
from tests.kernels.helpers import BFLOAT16_BOUND, relative_error
from tests.kernels.moe.test_expert_formats import MAKERS
from tests.kernels.moe.test_grouped_gemm import ALPHA, LIMIT, NUM_EXPERTS, TOP_K, choices

IS_HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability()[0] == 9
TABLES = tuning.PACKED_GATE_UP, tuning.PACKED_DOWN
TILES = [*dict.fromkeys(rule.config for table in TABLES for rule in table.rules)]


@pytest.mark.skipif(not IS_HOPPER, reason="needs Hopper's tensor cores")
@pytest.mark.parametrize("tile", TILES, ids=str)
@pytest.mark.parametrize("num_tokens", [5, 300])
@pytest.mark.parametrize(
    ("maker", "group", "inner", "hidden"),
    [("int4", 128, 384, 256), ("int4", 32, 256, 512), ("e2m1", 32, 384, 256), ("e2m1", 32, 256, 2880)],
)
def test_equals_the_weights_that_are_meant(
    maker: str, group: int, inner: int, hidden: int, num_tokens: int, tile: ExpertTile, device: torch.device
) -> None:
    """Tiles may be partly empty; with 2,880 columns, rows of W end in zeros that x lacks."""
    x = torch.randn(num_tokens, hidden, device=device).bfloat16() / hidden**0.5
    gate_up, scales, wide = MAKERS[maker](2 * inner, hidden, group, device)
    bias = torch.randn(NUM_EXPERTS, 2 * inner, device=device).bfloat16()
    chosen, _ = choices(num_tokens, device)
    pairs, experts = sort_pairs(chosen, NUM_EXPERTS), chosen.flatten().long()
    assert takes_packed(x, gate_up, scales)
    both = torch.einsum("ph,pih->pi", x.double().repeat_interleave(TOP_K, 0), wide.double()[experts]) + bias[experts]
    gate, up = both.chunk(2, dim=1)
    clamped = gate.clamp(max=LIMIT)
    of_clamped = clamped * torch.sigmoid(ALPHA * clamped) * (up.clamp(-LIMIT, LIMIT) + 1)
    for kind, expected in (((ALPHA, LIMIT), of_clamped), ((1.0, 0.0), silu_mul(both))):
        out = packed_experts(x, gate_up, pairs, tile, TOP_K, None, scales, bias, kind)
        assert relative_error(out, expected) < BFLOAT16_BOUND
    plain = packed_experts(x, gate_up, pairs, tile, TOP_K, None, scales, None)
    assert relative_error(plain, silu_mul(both - bias[experts])) < BFLOAT16_BOUND


@pytest.mark.skipif(not IS_HOPPER, reason="needs Hopper's tensor cores")
@pytest.mark.parametrize("tile", TILES, ids=str)
@pytest.mark.parametrize(("maker", "group", "inner"), [("int4", 128, 768), ("e2m1", 32, 2944)])
def test_down_is_shared_out(maker: str, group: int, inner: int, tile: ExpertTile, device: torch.device) -> None:
    """One expert has no tokens, and pairs of other ranks are not written."""
    num_tokens, hidden = 200, 264
    chosen, shares = choices(num_tokens, device)
    chosen[chosen == 2] = -1
    inside = torch.randn(num_tokens * TOP_K, inner, device=device).bfloat16() / inner**0.5
    down, scales, wide = MAKERS[maker](hidden, inner, group, device)
    bias = torch.randn(NUM_EXPERTS, hidden, device=device).bfloat16()
    experts = chosen.flatten().long()
    pairs = sort_pairs(chosen, NUM_EXPERTS)
    out = packed_experts(inside, down, pairs, tile, TOP_K, shares, scales, bias)
    y = torch.einsum("pi,phi->ph", inside.double(), wide.double()[experts.clamp(min=0)]) + bias[experts]
    expected = (y * shares.flatten()[:, None]).unflatten(0, (num_tokens, TOP_K)).transpose(0, 1)
    held = (chosen >= 0).T
    assert relative_error(out[held], expected[held]) < BFLOAT16_BOUND
    assert torch.equal(packed_experts(inside, down, pairs, tile, TOP_K, shares, scales, bias)[held], out[held])


def test_what_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packed_experts_module, "has_wgmma", lambda _: True)
    cpu = torch.device("cpu")
    x = torch.zeros(20, 264, dtype=torch.bfloat16)
    weight, scales, _ = MAKERS["int4"](32, 256, 128, cpu)
    assert takes_packed(x[:, :256], weight, scales)
    assert not takes_packed(x[:, 4:260], weight, scales)  # rows at 8 bytes
    assert not takes_packed(x[:, :256].half(), weight, scales)
    assert not takes_packed(x[:, :256], weight[:, :24].contiguous(), scales[:, :24].contiguous())
    assert not takes_packed(x[:, :192], *MAKERS["int4"](32, 192, 64, cpu)[:2])  # chunks of 64 columns
    assert not takes_packed(x[:, :256], torch.zeros(NUM_EXPERTS, 32, 256, dtype=torch.bfloat16), None)
    monkeypatch.setattr(packed_experts_module, "has_wgmma", lambda _: False)
    assert not takes_packed(x[:, :256], weight, scales)


def test_every_rule_is_found_somewhere() -> None:
    loads, columns = (2, 4, 8, 16, 32, 64, 128, 256, 1024), (768, 2880)
    for table in TABLES:
        found = {
            table.find(pairs_per_expert=load, columns=count, scale_words=words)
            for load in loads for count in columns for words in (1, 4)
        }  # fmt: skip
        assert {rule.config for rule in table.rules} <= found
    weight, scales, _ = MAKERS["int4"](8, 768, 128, torch.device("cpu"))
    assert tile_of(weight, scales, False, 4) is None
    assert tile_of(weight, scales, True, 4) == tuning.TILE_OF_8
