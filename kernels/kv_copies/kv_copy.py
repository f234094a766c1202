"""Copies KV blocks between pools and computes their digests; all layers of a block are one row of 64-bit words.

    target[target_ids[i]] = source[source_ids[i]]                 or, of each block, the words of a `WordCopy`
    digest_i = sum_j (a_j * x_ij + b_j * (x_ij >> 32))  mod 2^64     of the words x_i of block source_ids[i]

The weights a, b, which are an argument, are those of `kvstore.pool.digest`.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True)
class WordCopy:
    """Words from one block to another, for i below `height`:

        target[i * target_pitch + target_offset :][:width] = source[i * source_pitch + source_offset :][:width]

    No range of `width` crosses the end of a pitch, and blocks are whole pitches long.
    """

    height: int
    width: int
    source_offset: int
    source_pitch: int
    target_offset: int
    target_pitch: int

    def fits(self, source_words: int, target_words: int) -> bool:
        """Whether the copy stays within blocks of these sizes."""
        places = (
            (source_words, self.source_offset, self.source_pitch),
            (target_words, self.target_offset, self.target_pitch),
        )
        return all(
            length % pitch == 0
            and offset % pitch + self.width <= pitch
            and offset // pitch + self.height <= length // pitch
            for length, offset, pitch in places
        )


def copy_blocks(
    source: Tensor, source_ids: Tensor, target: Tensor, target_ids: Tensor, weights: Tensor | None = None,
    copy: WordCopy | None = None, digests: Tensor | None = None,
) -> Tensor | None:  # fmt: skip
    """Copy blocks. source, target: int64 (num_blocks, num_words), of the same length unless there is a `copy`.

    weights: int64 (2, words of a source block) -> digests int64 (num_ids,) of whole source blocks, added to `digests`
    if they are given.
    """
    if copy is None:
        target[target_ids.long()] = source[source_ids.long()]
    else:
        pieces = _ranges(source[source_ids.long()], copy, copy.source_offset, copy.source_pitch)
        places = _ranges(target, copy, copy.target_offset, copy.target_pitch)
        places[target_ids.long()] = pieces
    return None if weights is None else digest_blocks(source, source_ids, weights, digests)


def digest_blocks(blocks: Tensor, ids: Tensor, weights: Tensor, digests: Tensor | None = None) -> Tensor:
    """Compute digests: blocks int64 (num_blocks, num_words), weights int64 (2, num_words) -> int64 (num_ids,).

    With `digests`, the result is added to them.
    """
    words = blocks[ids.long()]
    result = (weights[0] * words + weights[1] * (words >> 32)).sum(dim=1)
    return result if digests is None else digests.add_(result)


def _ranges(blocks: Tensor, copy: WordCopy, offset: int, pitch: int) -> Tensor:
    """Return the words of blocks that are copied, (num_blocks, height, width), as a view."""
    first, column = divmod(offset, pitch)
    pitches = blocks.view(blocks.shape[0], -1, pitch)
    return pitches[:, first : first + copy.height, column : column + copy.width]
