"""Samples tokens on the device: greedy, or seeded with temperature, top-k, top-p and min-p, without the host.

Keeps each row's parameters on the device. `engine.sampling.sampler` samples the same tokens from the same seeds.
"""

from __future__ import annotations

import torch
from torch import Tensor

from engine.gpu.pinning import upload
from engine.gpu.steps.rows import RowChanges
from engine.gpu.vocabulary import WHOLE_VOCABULARY, Vocabulary
from kernels.gpu.sampling.sampling import choose_tokens, chunk_stats, num_chunks_of


class DeviceSampler:
    """Parameters of `max_rows` rows. Its workspace serves one stream."""

    def __init__(
        self, max_rows: int, vocab_size: int, device: torch.device, vocabulary: Vocabulary = WHOLE_VOCABULARY
    ) -> None:
        """vocabulary: of this rank's logits; all ranks sample the same tokens, by statistics of each part."""
        self.max_rows = max_rows
        self._device = device
        self._vocabulary = vocabulary
        self._stats = torch.empty(max_rows * num_chunks_of(vocab_size) * 4, device=device)  # workspace
        self._truncates = torch.zeros(max_rows, dtype=torch.int32, device=device)
        self._temperatures = torch.zeros(max_rows, device=device)
        self._top_ks = torch.zeros(max_rows, dtype=torch.int32, device=device)
        self._top_ps = torch.ones(max_rows, device=device)
        self._min_ps = torch.zeros(max_rows, device=device)
        self._seeds = torch.zeros(max_rows, dtype=torch.int64, device=device)

    @property
    def _columns(self) -> tuple[Tensor, ...]:
        return self._temperatures, self._top_ks, self._top_ps, self._min_ps, self._seeds

    def apply(self, changes: RowChanges) -> None:
        """Bring rows that changed their owner up to date."""
        if changes.moved:
            old, new = (upload(rows, torch.int64, self._device) for rows in zip(*changes.moved, strict=True))
            for column in (*self._columns, self._truncates):
                column[new] = column[old]
        if changes.fresh:
            params = [request.params for _, request in changes.fresh]
            integers = [
                [row for row, _ in changes.fresh],
                [_signed64(each.seed or 0) for each in params],
                [each.top_k for each in params],
                [each.temperature > 0 and (each.top_k > 0 or each.top_p < 1 or each.min_p > 0) for each in params],
            ]
            rows, seeds, top_ks, truncates = upload(integers, torch.int64, self._device)
            self._seeds[rows], self._top_ks[rows], self._truncates[rows] = seeds, top_ks.int(), truncates.int()
            fractions = [
                [each.temperature for each in params],
                [each.top_p for each in params],
                [each.min_p for each in params],
            ]
            temperatures, top_ps, min_ps = upload(fractions, torch.float32, self._device)
            self._temperatures[rows], self._top_ps[rows], self._min_ps[rows] = temperatures, top_ps, min_ps

    def sample(
        self, logits: Tensor, rows: slice | Tensor, positions: Tensor, last_tokens: Tensor | None = None,
        is_whole: bool = False,
    ) -> Tensor:  # fmt: skip
        """Sample a token for each of `rows`: int64 (n,), negative where there is none.

        logits: (n, vocab), this rank's part of them unless `is_whole`. positions: (n,), of the tokens.
        last_tokens: int64 (n,), takes the valid tokens of rows in use, those with a position above 0.
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


def _signed64(value: int) -> int:
    value &= (1 << 64) - 1
    return value - (1 << 64) if value >= 1 << 63 else value
