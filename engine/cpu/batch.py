"""The inputs of one forward pass, built from a plan's rows: the tokens of all rows, and where each row begins.

Plain Python lists and one numpy array; no torch, no device. Decode rows (a new token and drafts) come first.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from engine.plan import ScheduledRow
from engine.request_states import RequestState


@dataclass(slots=True)
class StepBatch:
    """Rows of one step, with their tokens concatenated.

    inputs: int64 [4, num_tokens]: token id, position, pool block that its KV is written to, offset in that block.
    query_starts: index of each row's first token, and num_tokens at the end.
    seq_lens: number of tokens that each row's last query sees, itself included.
    """

    rows: Sequence[ScheduledRow]
    requests: Sequence[RequestState]
    inputs: NDArray[np.int64]
    query_starts: list[int]
    seq_lens: list[int]

    @property
    def num_tokens(self) -> int:
        return self.query_starts[-1]


def build_batch(rows: Sequence[ScheduledRow], requests: Sequence[RequestState], block_size: int) -> StepBatch:
    """Flatten `rows`. Their requests must own blocks for all tokens up to the end of the row."""
    token_ids: list[int] = []
    positions: list[int] = []
    blocks: list[int] = []
    query_starts = [0]
    for row, request in zip(rows, requests, strict=True):
        start, stop, drafts = row.start, row.stop, row.draft_token_ids
        block_ids = request.block_ids
        token_ids += request.token_ids[start : stop - len(drafts)]
        if row.num_tokens == 1:
            positions.append(start)
            blocks.append(block_ids[start // block_size])
        else:
            token_ids += drafts
            positions += range(start, stop)
            blocks += [block_ids[position // block_size] for position in range(start, stop)]
        query_starts.append(len(token_ids))
    inputs = np.empty((4, len(token_ids)), dtype=np.int64)
    inputs[0], inputs[1], inputs[2] = token_ids, positions, blocks
    np.remainder(inputs[1], block_size, out=inputs[3])
    return StepBatch(
        rows=rows,
        requests=requests,
        inputs=inputs,
        query_starts=query_starts,
        seq_lens=[row.stop for row in rows],
    )
