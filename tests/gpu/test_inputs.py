from __future__ import annotations

import pytest
import torch

from engine.gpu.pinning import upload
from engine.gpu.steps.graphs import COUNT, SPAN
from engine.gpu.steps.inputs import query_inputs, step_tokens
from engine.gpu.steps.step import GpuBatch
from engine.plan import ScheduledRow
from engine.request import RequestId, SamplingParams
from engine.request_states import RequestState
from engine.runner import NO_DRAFT, sampled_queries
from kvstore.types import BlockId


def row(name: str, tokens: list[int], blocks: list[int], start: int, count: int) -> tuple[ScheduledRow, RequestState]:
    request = RequestState(RequestId(name), tokens, 3, SamplingParams())
    request.block_ids = [BlockId(block) for block in blocks]
    return ScheduledRow(request.request_id, start, count, True), request


def test_tokens_positions_and_slots_of_a_mixed_step() -> None:
    decodes = [row("a", [1, 2, 3, 4, 5], [7, 2], 5, 1), row("b", [6], [9], 0, 1)]  # the first one's is not known yet
    chunks = [row("c", [10, 11, 12, 13, 14, 15], [3, 8, 5], 1, 4), row("d", [20, 21], [1], 0, 2)]
    ids, positions, slots = step_tokens(decodes, chunks, 4).tolist()
    assert ids == [0, 6, 11, 12, 13, 14, 20, 21]
    assert positions == [5, 0, 1, 2, 3, 4, 0, 1]
    assert slots == [2 * 4 + 1, 9 * 4, 13, 14, 15, 8 * 4, 4, 5]


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


def test_decode_rows_alone_and_chunks_alone() -> None:
    chunk = step_tokens([], [row("c", [10, 11], [3], 0, 2)], 4)
    assert chunk[:, :2].tolist() == [[10, 11], [0, 1], [12, 13]]
    assert step_tokens([row("a", [1], [6], 3, 1)], [], 4)[:, :1].tolist() == [[0], [3], [27]]


def test_each_field_starts_at_an_aligned_address() -> None:
    for count in (1, 4, 5, 7):
        fields = step_tokens([], [row("c", list(range(9)), [3, 4, 5], 0, count)], 4)
        assert count <= fields.shape[1] < count + 4
        assert fields.strides[0] % 16 == 0


def test_upload_keeps_values_and_type() -> None:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    assert upload([1, -2], torch.int64, device).tolist() == [1, -2]
    assert upload([[0.5], [2.0]], torch.float32, device).tolist() == [[0.5], [2.0]]
    assert upload([], torch.int32, device).shape == (0,)
