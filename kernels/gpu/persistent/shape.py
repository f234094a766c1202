"""Sizes of a model as the kernel's compile-time constant, and what follows from them."""

from __future__ import annotations

from dataclasses import dataclass

import triton

HEAD_DIM = 128
NUM_WEIGHTS = 4  # of a layer
CHUNK = 1024  # columns of W in a slot of shared memory, of 8 rows
TILE_KEYS = 64  # of K or V in a slot
SOFTMAX_TILES = 2  # tiles of keys that are scored before their values are added up


@dataclass(frozen=True)
class Shape:
    """programs: one for each multiprocessor. slots: of a program. halves_ahead: half slots on their way at a time."""

    hidden: int
    heads: int
    kv_heads: int
    intermediate: int
    block_size: int
    programs: int
    slots: int = 10
    halves_ahead: int = 3
    traces: bool = False

    @property
    def group(self) -> int:
        return self.heads // self.kv_heads

    @property
    def qkv(self) -> int:
        return (self.heads + 2 * self.kv_heads) * HEAD_DIM

    @property
    def attended(self) -> int:
        return self.heads * HEAD_DIM

    @property
    def splits(self) -> int:
        """Programs that share the keys of a KV head, a power of two."""
        return 1 << (self.programs // self.kv_heads).bit_length() - 1

    @property
    def most_tiles(self) -> int:
        """Tiles of 8 rows of W that a program multiplies at most, rounded up to a power of two."""
        rows = max(self.qkv, self.hidden, self.intermediate)
        return int(triton.next_power_of_2(-(-rows // 8 // self.programs)))

    @property
    def combined(self) -> int:
        """Dimensions of a KV head's queries that a program combines from all splits."""
        return self.group * HEAD_DIM // self.splits

    @property
    def combined_words(self) -> int:
        """What it reads for that: the dimensions, maximum and sum of each split; rounded up to a power of two."""
        return int(triton.next_power_of_2(self.group * HEAD_DIM + 2 * self.splits))

    @property
    def head_rows(self) -> int:
        """Heads of q, k and v of a KV head, rounded up to a power of two."""
        return int(triton.next_power_of_2(self.group + 2))

    @property
    def norms(self) -> int:
        """Weights of a layer's four norms: of attention, of the MLP, of q and of k."""
        return 2 * self.hidden + 2 * HEAD_DIM

    @property
    def room(self) -> int:
        """The longest vector that a product takes."""
        return int(triton.next_power_of_2(max(self.attended, self.hidden, self.intermediate, CHUNK)))

    @property
    def most_slots(self) -> int:
        """Slots that a stage waits for at once."""
        stages = (self.qkv, self.hidden, 1), (self.intermediate, self.hidden, 2)
        back = (self.hidden, self.attended, 1), (self.hidden, self.intermediate, 1)
        return max(-(-n // 8 // self.programs) * -(-k // CHUNK) * times for n, k, times in (*stages, *back))

    def fits(self) -> bool:
        """Whether the kernel takes this model: its vectors fill chunks, and no stage needs more slots than there are.

        Each program has rows of W_qkv, so that none overtakes another by more than a layer (`ll_protocol.py`).
        """
        inner = self.attended, self.hidden, self.intermediate
        has_chunks = all(k >= CHUNK and k % HEAD_DIM == 0 for k in inner) and self.qkv // 8 >= self.programs
        has_parts = self.combined <= HEAD_DIM and HEAD_DIM % max(self.combined, 1) == 0
        has_heads = self.group <= 8 and TILE_KEYS % self.block_size == 0
        return has_chunks and has_parts and has_heads and self.most_slots <= self.slots
