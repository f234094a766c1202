from __future__ import annotations

import pytest
import torch

from kernels.gpu.attention.decode_plan import make_plan, num_programs, plan_decode
from kernels.gpu.attention.kv_splits import DecodeWorkspace
from kernels.gpu.attention.paged_decode import paged_decode
from kernels.gpu.speculation.paged_verify import most_queries, paged_verify
from kernels.gpu.tuning import DecodeConfig
from kernels.paged_attention import attend_causally
from tests.kernels.helpers import (
    BFLOAT16_BOUND,
    HALF_DTYPE,
    block_tables_for,
    fill_sequence,
    poisoned_pool,
    relative_error,
)

LAYER = 1
SMALL = DecodeConfig(16, 4, 2, 2)
LISTS_BLOCKS = DecodeConfig(16, 4, 2, 2, lists_blocks=True)
PADDING = 0  # a group without a sequence


class Case:
    """Inputs of `paged_verify` for groups of (keys of the first query, number of queries)."""

    def __init__(
        self, groups: list[tuple[int, int]], num_heads: int, num_kv_heads: int, dtype: torch.dtype,
        device: torch.device, block_size: int = 16, head_dim: int = 32, kv_dtype: torch.dtype | None = None,
    ) -> None:  # fmt: skip
        spans = [first + count - 1 if first else PADDING for first, count in groups]
        tables, table = block_tables_for(spans, block_size, device)
        self.pool = poisoned_pool(
            sum(map(len, tables)), 2, num_kv_heads, block_size, head_dim, kv_dtype or dtype, device
        )
        kvs = [fill_sequence(self.pool, LAYER, ids, span) for ids, span in zip(tables, spans, strict=True)]
        rows = [row for row, (_, count) in enumerate(groups) for _ in range(count)]
        qkv = torch.randn(len(rows), num_heads + 2 * num_kv_heads, head_dim, device=device).to(dtype)
        self.q = qkv[:, :num_heads]
        self.table = table[rows]
        lengths, leaders, counts = [], [], []
        for first, count in groups:
            if first:
                leaders.append(len(lengths))
                counts.append(count)
            lengths += [first + index if first else 0 for index in range(count)]
        fields = torch.zeros(4, len(rows), dtype=torch.int32)
        fields[:2] = torch.tensor([lengths, [spans[row] for row in rows]])
        fields[2:, : len(leaders)] = torch.tensor([leaders, counts])
        self.lengths, self.groups = fields[0].to(device), fields[1:].to(device)
        self.expected = torch.zeros(len(rows), num_heads * head_dim, dtype=torch.float64, device=device)
        for query, (row, length) in enumerate(zip(rows, lengths, strict=True)):
            if length:
                own = self.q[query : query + 1].double()
                self.expected[query] = attend_causally(own, *kvs[row][:, :, :length].double()).flatten()
        self.most = most_queries(num_heads // num_kv_heads)
        self.workspace = DecodeWorkspace(len(rows), num_heads, num_kv_heads, head_dim, device, self.most)
        num_partials = max(4096, self.workspace.outputs.shape[0])
        self.workspace.outputs = torch.full((num_partials, head_dim), float("nan"), device=device)
        self.workspace.log_sums = torch.full((num_partials,), float("nan"), device=device)

    def run(self, config: DecodeConfig | None = SMALL, programs: int | None = None) -> torch.Tensor:
        num_heads, spans, most = self.q.shape[1], self.groups[0], self.most
        plan = plan_decode(spans, num_heads, self.pool, 0, self.groups, most)
        config = config or plan.config
        if programs is not None or config is not plan.config:
            count = programs or num_programs(self.pool.shape[3], spans.device, config)
            plan = make_plan(spans, config, count, 0, self.groups, most)
        return paged_verify(
            self.q, self.pool, LAYER, self.table, self.lengths, self.groups, plan, self.workspace
        )  # fmt: skip


# Lengths across the end of a tile (16 keys) and of a share (32 keys): in the groups from 30, 62 and 64 keys on, the
# first queries see no key of the last share. Padding comes last, in columns that hold no group.
MIXED = [(1, 4), (30, 4), (64, 2), (15, 3), (200, 1), (62, 4), (1, 1), (PADDING, 12)]


@pytest.mark.parametrize("programs", [1, 3, 8, None])
@pytest.mark.parametrize(("num_heads", "num_kv_heads"), [(8, 2), (7, 1), (14, 2)])
def test_equals_the_reference_of_each_query(
    programs: int | None, num_heads: int, num_kv_heads: int, device: torch.device
) -> None:
    case = Case(MIXED, num_heads, num_kv_heads, torch.float32, device)
    out = case.run(programs=programs)
    assert relative_error(out, case.expected) < 1e-5
    assert not out[case.lengths == 0].any()


@pytest.mark.parametrize("programs", [1, 8])
@pytest.mark.parametrize("config", [SMALL, LISTS_BLOCKS])
@pytest.mark.parametrize("block_size", [16, 64])
def test_half_precision_over_blocks_of_other_sizes(
    block_size: int, config: DecodeConfig, programs: int, device: torch.device
) -> None:
    case = Case(MIXED, 7, 1, HALF_DTYPE, device, block_size)
    assert relative_error(case.run(config, programs), case.expected) < BFLOAT16_BOUND


@pytest.mark.parametrize("programs", [1, 4])
def test_eight_bit_keys_and_values(programs: int, device: torch.device) -> None:
    case = Case(MIXED, 8, 2, HALF_DTYPE, device, kv_dtype=torch.float8_e4m3fn)
    assert relative_error(case.run(programs=programs), case.expected) < BFLOAT16_BOUND


@pytest.mark.parametrize("programs", [1, 3])
def test_single_queries_get_what_decode_gives_them(programs: int, device: torch.device) -> None:
    case = Case([(length, 1) for length in (1, 16, 17, 70, 200)], 8, 2, HALF_DTYPE, device)
    plan = make_plan(case.lengths, SMALL, programs)
    decoded = paged_decode(case.q, case.pool, LAYER, case.table, case.lengths, plan, case.workspace)
    assert torch.equal(case.run(programs=programs), decoded)


@pytest.mark.parametrize("group", [1, 3, 4, 8, 16])
def test_as_many_queries_as_a_group_may_have(group: int, device: torch.device) -> None:
    most = most_queries(group)
    assert group * most <= 32
    case = Case([(20, most), (63, most)], group, 1, torch.float32, device)
    assert relative_error(case.run(programs=4), case.expected) < 1e-5


def test_four_queries_where_32_heads_hold_them_and_more_where_16_do() -> None:
    assert [most_queries(group) for group in (1, 2, 4, 5, 7, 8, 16, 32, 64)] == [16, 8, 4, 4, 4, 4, 2, 1, 1]


def test_a_workspace_serves_any_number_of_queries(device: torch.device) -> None:
    for count in (1, 3, 9, 39):
        case = Case([(40, 1)] * count, 8, 2, HALF_DTYPE, device, head_dim=16)
        case.workspace = DecodeWorkspace(39, 8, 2, 16, device, 4)
        assert relative_error(case.run(None), case.expected) < BFLOAT16_BOUND
