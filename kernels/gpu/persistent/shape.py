"""Sizes of a model as the kernel's compile-time constant, and the sizes that follow from them."""

from __future__ import annotations

from dataclasses import astuple, dataclass, replace

import triton

HEAD_DIM = 128
LATENT_RANK, ROPE_DIM = 512, 64  # of latent attention
LATENT_ROWS = 64  # rows of W_UK^T that a program multiplies
NUM_ADDRESSES = 12  # per layer: five weights, the scales of four of them, the bias of W_qkv, W_UK, W_UV
CHUNK = 1024  # columns of a bfloat16 W in a slot of shared memory, which has 8 rows
PIECE = 4096  # numbers that are received and multiplied at a time of a vector of more than two pieces
MAX_CHUNKS = 4  # a vector of fewer chunks stays in registers for several tiles
MAX_SPLITS = 64  # of a KV head's keys; no model with a single KV head has been tried
MAX_PAIR_CHUNKS = 5  # of a vector that stays in registers for a pair of tiles
TILE_KEYS = 64  # rows of K or V in a slot
SLOT_BYTES, MAX_SLOTS = 16 << 10, 12
SLOTS_AT_ONCE = 6  # slots multiplied without a barrier in between: as many as fit into registers
HOPPERS_SHARED_BYTES = 227 << 10  # per program
SOFTMAX_TILES = 2  # tiles of keys that are scored before their values are added


@dataclass(frozen=True)
class Shape:
    """programs: one per multiprocessor. slots: per program. halves_ahead: half slots whose loads may be in flight.

    intermediate: of the MLP, or of an expert. experts: number of routed experts, 0: a dense model. chosen: experts
    per token, including the shared ones, whose weights follow those of the routed ones. normalizes: whether the
    shares of a token's routed experts add up to 1. dense_layers: number of first layers with a dense MLP, which is
    cut into `chosen` experts. is_e4m3: all weights but the router's are e4m3 with a scale per row, not bfloat16.
    has_qk_norms: of q's and k's heads. has_biases: of W_qkv. is_latent: W_qkv has rows of q_nope and q_rope of each
    head, then of the latent; kv_heads is then the number of groups of 8 heads.
    """

    hidden: int
    heads: int
    kv_heads: int
    intermediate: int
    block_size: int
    programs: int
    experts: int = 0
    chosen: int = 1
    normalizes: bool = True
    is_e4m3: bool = False
    has_qk_norms: bool = True
    has_biases: bool = False
    slots: int = 10
    halves_ahead: int = 3
    traces: bool = False
    shared: int = 0
    dense_layers: int = 0
    is_latent: bool = False

    @property
    def text(self) -> str:
        """The shape as a string, which Triton's hooks can serialize."""
        return ",".join(str(int(each)) for each in astuple(self))

    @property
    def group(self) -> int:
        return self.heads // self.kv_heads

    @property
    def qkv(self) -> int:
        if self.is_latent:
            return self.heads * (HEAD_DIM + ROPE_DIM) + LATENT_RANK + ROPE_DIM
        return (self.heads + 2 * self.kv_heads) * HEAD_DIM

    @property
    def attended(self) -> int:
        return self.heads * HEAD_DIM

    @property
    def inner(self) -> int:
        """Columns of W_down for all experts of a token."""
        return self.intermediate * self.chosen

    @property
    def splits(self) -> int:
        """Number of programs that split the keys of a KV head, a power of two."""
        return 1 << max(self.programs // self.kv_heads, 1).bit_length() - 1

    def tiles(self, n: int) -> int:
        """Return the largest number of 8-row tiles that a program multiplies of a W of n rows."""
        return -(-n // 8 // self.programs)

    @property
    def columns(self) -> int:
        """Columns of W in a slot; the router's have CHUNK."""
        return 2 * CHUNK if self.is_e4m3 else CHUNK

    def order(self, n: int, k: int, times: int) -> str:
        """Return the order in which a program multiplies W (n, k), or gate and up; "tiles": whole tiles at a time.

        Two tiles of long rows would fill the ring. So a program takes a chunk of all its tiles at a time ("chunks"),
        if the ring has twice as many slots, otherwise a chunk of two tiles ("pairs").
        """
        if -(-k // CHUNK) < MAX_CHUNKS:
            return "tiles"
        return "chunks" if times == 1 and self.tiles(n) <= self.slots // 2 else "pairs"

    def is_by_pieces(self, k: int) -> bool:
        """Whether a program receives and multiplies a vector of k numbers a PIECE at a time."""
        return k > 2 * PIECE

    def tiles_at_once(self, n: int, k: int, times: int, columns: int) -> int:
        """Return how many tiles a program multiplies at once: all, or some pairs. times: number of W (n, k)."""
        count, chunks = self.tiles(n) * times, -(-k // columns)
        return count if count * chunks <= SLOTS_AT_ONCE else max(SLOTS_AT_ONCE // 2 // chunks, 1) * 2

    def chunks_at_once(self, n: int, k: int, columns: int) -> int:
        """Return how many chunks of all its tiles of W (n, k) a program multiplies at once."""
        count, tiles = -(-k // columns), self.tiles(n)
        return count if count * tiles <= SLOTS_AT_ONCE else max(SLOTS_AT_ONCE // tiles, 1)

    @property
    def stages(self) -> tuple[tuple[int, int, int, int], ...]:
        """(n, k, number of W of this shape, columns in a slot) of each GEMV."""
        columns = self.columns
        attention = (self.qkv, self.hidden, 1, columns), (self.hidden, self.attended, 1, columns)
        router = ((self.experts, self.hidden, 1, CHUNK),) if self.experts else ()
        return (*attention, *router, (self.inner, self.hidden, 2, columns), (self.hidden, self.inner, 1, columns))

    @property
    def most_tiles(self) -> int:
        """Number of tiles whose sums a program keeps, a power of two; gate and up count once."""
        counts = []
        for n, k, times, columns in self.stages:
            of_order = {"chunks": 1, "pairs": 2}
            together = of_order.get(self.order(n, k, times)) or self.tiles_at_once(n, k, times, columns)
            counts.append(-(-self.tiles(n) * times // together) * together // times)
        return int(triton.next_power_of_2(max(counts)))

    @property
    def combined(self) -> int:
        """Number of dimensions of a KV head's queries that a program combines from all splits, a power of two.

        If the group is not a power of two, some programs have none.
        """
        value_dim = LATENT_RANK if self.is_latent else HEAD_DIM
        return int(triton.next_power_of_2(-(-self.group * value_dim // self.splits)))

    @property
    def combined_words(self) -> int:
        """Words that it reads for that: each split's dimensions, maximum and sum; padded to a power of two."""
        if self.is_latent:  # unpadded: the dimensions, a power of two, are read on their own
            return self.splits * (self.combined + 2)
        return int(triton.next_power_of_2(self.splits * (self.combined + 2)))

    @property
    def head_rows(self) -> int:
        """Number of heads of q, k and v for a KV head, rounded up to a power of two."""
        return int(triton.next_power_of_2(self.group + 2))

    @property
    def norms(self) -> int:
        """Number of weights of a layer's norms: attention's, the MLP's, and the latents' or q's and k's (or ones)."""
        return 2 * self.hidden + (LATENT_RANK if self.is_latent else 2 * HEAD_DIM)

    @property
    def head_dim(self) -> int:
        """Length of a query, by which scores are scaled."""
        return HEAD_DIM + ROPE_DIM if self.is_latent else HEAD_DIM

    @property
    def rotated(self) -> int:
        """Number of rotated dimensions of a head."""
        return ROPE_DIM if self.is_latent else HEAD_DIM

    @property
    def most_chunks(self) -> int:
        """Number of chunks of the longest vector or piece that a GEMV stores, rounded up to whole slots of W."""
        lengths = (PIECE if self.is_by_pieces(k) else k for _, k, _, _ in self.stages)
        return max(-(-length // self.columns) for length in lengths) * self.columns // CHUNK

    @property
    def shared_bytes(self) -> int:
        """Shared memory of a program without the slots; GEMVs and attention share it. Checked by a test."""
        vectors = (2 * 2 * CHUNK + 4 * 8 * self.is_e4m3) * self.most_chunks
        sums = 2 * self.most_tiles * 64 * 4
        received = 4 * 2 * self.head_rows * HEAD_DIM
        softmax = 2 * 8 * HEAD_DIM * 2 + SOFTMAX_TILES * 8 * TILE_KEYS * (4 + 2 * 2)
        heads = 4 * HEAD_DIM * max(self.head_rows, 8)
        attention = max(received, heads + softmax, 4 * self.combined_words)
        if self.is_latent:
            attention = 2 * 2 * 8 * (LATENT_RANK + ROPE_DIM) + 4 * LATENT_RANK + 8 * TILE_KEYS * (4 + 2 * 2)
        of_choice = 2 * 4 * 256 + 8 * self.experts if self.experts else 0
        return max(vectors + sums, attention) + of_choice + 512

    def tuned(self) -> Shape:
        """Return the shape with as many slots as fit, up to MAX_SLOTS: more gain nothing.

        Loads delay words of other programs. So few are in flight if the ring holds any stage's weights twice, and
        most for dense models in bfloat16, whose weights keep memory busy.
        """
        slots = min((HOPPERS_SHARED_BYTES - self.shared_bytes) // SLOT_BYTES, MAX_SLOTS)
        is_whole = all(2 * self.tiles(n) * times * -(-k // columns) <= slots for n, k, times, columns in self.stages)
        is_large = not self.is_e4m3 and not self.experts
        return replace(self, slots=slots, halves_ahead=3 if is_whole else 6 if is_large else 5)

    @property
    def layer_bytes(self) -> int:
        """Bytes of weights that a layer reads."""
        of_latents = 2 * self.heads * 2 * HEAD_DIM * LATENT_RANK if self.is_latent else 0
        return of_latents + sum(2 * CHUNK // columns * n * k * times for n, k, times, columns in self.stages)

    def fits(self) -> bool:
        """Whether the kernel supports this model: vectors of a chunk or more, and enough slots for every stage.

        Each program must have rows of W_qkv, so that none gets more than a layer ahead (`ll_protocol.py`).
        """
        inner = self.attended, self.hidden, self.inner
        has_chunks = all(k >= CHUNK and k % HEAD_DIM == 0 for k in inner) and self.qkv // 8 >= self.programs
        is_divided = self.combined <= HEAD_DIM
        has_programs = self.kv_heads <= self.programs and self.splits <= MAX_SPLITS
        has_heads = self.group <= 8 and TILE_KEYS % self.block_size == 0 and has_programs
        has_experts = self.intermediate % HEAD_DIM == 0 and (self.experts, self.chosen) in ((0, 1), (64, 8), (128, 8))
        lacks_scales = self.dense_layers or (self.experts and self.is_by_pieces(self.inner))  # for experts
        has_scales = not (self.is_e4m3 and lacks_scales)
        has_slots = all(self._has_slots(*each) for each in self.stages)
        parts = self.heads * LATENT_RANK // LATENT_ROWS if self.is_latent else 0  # of W_UK and W_UV, a program's each
        has_latents = parts <= self.programs and (not self.is_latent or (self.group == 8 and not self.is_e4m3))
        return has_chunks and is_divided and has_heads and has_experts and has_scales and has_slots and has_latents

    def _has_slots(self, n: int, k: int, times: int, columns: int) -> bool:
        order = self.order(n, k, times)
        if order == "tiles":
            return -(-k // columns) <= self.slots // 2
        return order == "chunks" or -(-k // CHUNK) <= MAX_PAIR_CHUNKS
