"""A copy of some heads and layers of a block into another block. Plain numbers; `head_split` finds them."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class HeadCopy:
    """Bytes from one block to another, for i below `height`:

    target[i * target_pitch + target_offset :][:width] = source[i * source_pitch + source_offset :][:width]

    No range of `width` goes beyond the end of a pitch, and blocks are whole pitches long.
    """

    height: int
    width: int
    source_offset: int
    source_pitch: int
    target_offset: int
    target_pitch: int
