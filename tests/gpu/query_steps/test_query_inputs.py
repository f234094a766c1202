"""Inputs of steps whose decode rows have drafts."""

from __future__ import annotations

import pytest

from engine.gpu.steps.step import GpuBatch
from engine.query_steps.inputs import COUNT, SPAN, query_inputs
from engine.runner import NO_DRAFT, sampled_queries
from tests.gpu.test_inputs import row


def test_queries_of_decode_rows_with_drafts() -> None:
    pairs = [row("a", [1, 2, 3, 4], [7, 2], 3, 3), row("b", [6], [9], 0, 1)]
    pairs[0][0].draft_token_ids = (8, 9)
    batch = GpuBatch([scheduled for scheduled, _ in pairs], [request for _, request in pairs], [5, 0])
    positions, slots, lengths, token_ids, device_rows, spans, leaders, counts = query_inputs(batch, 4).tolist()
    assert positions == [3, 4, 5, 0]
    assert slots == [7 * 4 + 3, 2 * 4, 2 * 4 + 1, 9 * 4]
    assert lengths == [4, 5, 6, 1]
    assert token_ids == [4, 8, 9, 6]
    assert device_rows == [5, 5, 5, 0]
    assert leaders == [0, 1, 2, 3]
    assert counts == [1, 1, 1, 1]
    assert spans == lengths
    found = [
        (index, i, position, draft)
        for index, i, _, position, draft in sampled_queries(batch.rows, batch.requests, range(2))
    ]
    assert found == [(0, 0, 4, 8), (1, 0, 5, 9), (2, 0, 6, NO_DRAFT), (3, 1, 1, NO_DRAFT)]


@pytest.mark.parametrize(
    ("most_queries", "spans", "leaders", "counts"),
    [
        (2, [5, 5, 6, 1], [0, 2, 3, 0], [2, 1, 1, 0]), (3, [6, 6, 6, 1], [0, 3, 0, 0], [3, 1, 0, 0]),
        (4, [6, 6, 6, 1], [0, 3, 0, 0], [3, 1, 0, 0]),
    ],
)  # fmt: skip
def test_queries_of_a_row_in_groups(
    most_queries: int, spans: list[int], leaders: list[int], counts: list[int]
) -> None:
    pairs = [row("a", [1, 2, 3, 4], [7, 2], 3, 3), row("b", [6], [9], 0, 1)]
    pairs[0][0].draft_token_ids = (8, 9)
    batch = GpuBatch([scheduled for scheduled, _ in pairs], [request for _, request in pairs], [5, 0])
    queries = query_inputs(batch, 4, most_queries=most_queries)
    assert queries[SPAN : COUNT + 1].tolist() == [spans, leaders, counts]
