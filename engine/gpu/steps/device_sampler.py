"""Samples tokens on the device: greedy, or seeded with temperature, top-k, top-p and min-p.

Each row's parameters stay on the device. `engine.cpu.sampler` samples the same tokens from the same seeds.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from engine.gpu.ops.rules import WHOLE_VOCABULARY, Vocabulary
from engine.gpu.pinning import upload
from engine.gpu.steps.rows import RowChanges
from engine.request_states import RequestState
from kernels.gpu.sampling import choose_tokens, chunk_stats, num_chunks_of

NUM_FRACTIONS = 3  # lines of the table that are float32: temperature, top_p, min_p. Then top_k, and `truncates`


class DeviceSampler:
    """Sampling parameters of `max_rows` rows. The workspace serves one stream."""

    def __init__(
        self, max_rows: int, vocab_size: int, device: torch.device, vocabulary: Vocabulary = WHOLE_VOCABULARY
    ) -> None:
        """vocabulary: this rank's part. Ranks exchange statistics of their parts and sample the same tokens."""
        self.max_rows = max_rows
        self._device = device
        self._vocabulary = vocabulary
        self._stats = torch.empty(max_rows * num_chunks_of(vocab_size) * 4, device=device)  # workspace
        self._seeds = torch.zeros(max_rows, dtype=torch.int64, device=device)
        # One tensor, since a new request's parameters are written before its first step starts. Lines are aligned.
        self._table = torch.zeros(NUM_FRACTIONS + 2, -(-max_rows // 4) * 4, dtype=torch.int32, device=device)
        self._temperatures, self._top_ps, self._min_ps = self._table[:NUM_FRACTIONS, :max_rows].view(torch.float32)
        self._top_ks, self._truncates = self._table[NUM_FRACTIONS:, :max_rows]
        self._top_ps.fill_(1.0)

    @property
    def _columns(self) -> tuple[Tensor, ...]:
        return self._temperatures, self._top_ks, self._top_ps, self._min_ps, self._seeds

    def apply(self, changes: RowChanges) -> None:
        """Write the parameters of rows that belong to another request now."""
        if changes.moved:
            old, new = (upload(rows, torch.int64, self._device) for rows in zip(*changes.moved, strict=True))
            self._table[:, new] = self._table[:, old]
            self._seeds[new] = self._seeds[old]
        if changes.fresh:
            fresh = upload(_numbers_of(changes.fresh), torch.int64, self._device)
            self._seeds.index_copy_(0, fresh[0], fresh[1])
            self._table.index_copy_(1, fresh[0], fresh[2:].int())

    def sample(
        self, logits: Tensor, rows: slice | Tensor, positions: Tensor, last_tokens: Tensor | None = None,
        is_whole: bool = False,
    ) -> Tensor:  # fmt: skip
        """Sample a token for each of `rows`: int64 (n,), negative for padding.

        logits: (n, vocab), only this rank's part unless `is_whole`. positions: (n,), of the tokens; 0 for padding.
        last_tokens: int64 (n,), receives the valid tokens of rows in use.
        """
        token_ids = torch.empty(logits.shape[0], dtype=torch.int64, device=self._device)
        temperatures, top_ks, top_ps, min_ps, seeds = (column[rows] for column in self._columns)
        vocabulary = WHOLE_VOCABULARY if is_whole else self._vocabulary
        num_tokens, first_id = vocabulary.own(logits)
        num_chunks = num_chunks_of(num_tokens)
        stats = self._stats[: logits.shape[0] * num_chunks * 4].view(-1, num_chunks, 4)
        chunk_stats(logits, temperatures, seeds, positions, stats, num_tokens, first_id)
        stats, logits = vocabulary.joined(stats, logits, self._truncates, rows)
        choose_tokens(
            logits, stats, temperatures, top_ks, top_ps, min_ps, seeds, positions, token_ids, last_tokens
        )  # fmt: skip
        return token_ids


def _numbers_of(fresh: Sequence[tuple[int, RequestState]]) -> Any:
    """Return int64 (2 + lines of the table, n): the rows, their seeds and their columns of the table."""
    params = [request.params for _, request in fresh]
    fractions = np.array([(each.temperature, each.top_p, each.min_p) for each in params], np.float32)
    numbers = np.empty((2 + NUM_FRACTIONS + 2, len(params)), np.int64)
    seeds = np.array([each.seed or 0 for each in params], np.uint64)
    numbers[:2] = [row for row, _ in fresh], seeds.view(np.int64)
    numbers[2 : 2 + NUM_FRACTIONS] = fractions.view(np.int32).T
    numbers[-2:] = [each.top_k for each in params], [each.truncates for each in params]
    return numbers
