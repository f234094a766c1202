"""Which tokens' logits a process has, and how ranks that have parts put them together."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor


class Vocabulary:
    """The tokens whose logits a process has: here all of them. See `VocabShards` for ranks that have parts."""

    def own(self, logits: Tensor) -> tuple[int, int]:
        """How many columns of `logits` are of tokens, and the id of the first one."""
        return logits.shape[1], 0

    def joined(self, stats: Tensor, logits: Tensor, truncates: Tensor, rows: slice | Tensor) -> tuple[Tensor, Tensor]:
        """Statistics (rows, chunks, 4) and logits of the whole vocabulary; logits of rows with `truncates` alone."""
        return stats, logits

    def gathered(self, logits: Tensor) -> Tensor:
        """Logits (rows, vocab) of rows of which each rank has its part."""
        return logits

    def whole(self, logits: Tensor, sources: Sequence[int]) -> tuple[Tensor, Sequence[int]]:
        """Logits over the whole vocabulary in which rows `sources` of `logits` are, and which rows they are there."""
        return logits, sources


WHOLE_VOCABULARY = Vocabulary()
