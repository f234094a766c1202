from __future__ import annotations

import torch

from engine.gpu.pinning import upload
from engine.gpu.steps.inputs import step_tokens
from engine.plan import ScheduledRow
from engine.request import RequestId, SamplingParams
from engine.request_states import RequestState
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
