"""Sizes of a model as the kernel's compile-time constant, and what follows from them."""

from __future__ import annotations

from dataclasses import astuple, dataclass, replace

import triton

HEAD_DIM = 128
LATENT_RANK, ROPE_DIM = 512, 64  # of latent attention
LATENT_ROWS = 64  # of W_UK^T that a program multiplies
NUM_ADDRESSES = 12  # of a layer: those of its weights, of scales of four of them, of the bias of W_qkv, of W_UK, W_UV
CHUNK = 1024  # columns of a bfloat16 W in a slot of shared memory, of 8 rows
PIECE = 4096  # columns of a vector that are received and multiplied at a time, of one of more than two pieces
MAX_CHUNKS = 4  # of a vector that stays in registers with several tiles
MAX_SPLITS = 64  # of a KV head's keys: no model of one head has run
MAX_PAIR_CHUNKS = 5  # of one that does with a pair
TILE_KEYS = 64  # of K or V in a slot
SLOT_BYTES, MAX_SLOTS = 16 << 10, 12
SLOTS_AT_ONCE = 6  # that are multiplied without a barrier in between: what registers hold
HOPPERS_SHARED_BYTES = 227 << 10  # of a program
SOFTMAX_TILES = 2  # tiles of keys that are scored before their values are added up


@dataclass(frozen=True)
class Shape:
    """programs: one for each multiprocessor. slots: of a program. halves_ahead: half slots on their way at a time.

    intermediate: of the MLP, or of an expert. experts: from which a token chooses, 0: a dense model. chosen: of a
    token, with the shared ones, whose weights come after those of all others. normalizes: whether the shares of those
    that it chooses add up to 1. dense_layers: so many first ones, whose MLP is cut into as many experts as a token
    has. is_e4m3: weights but the router's are e4m3 with a scale for each row, not bfloat16.
    has_qk_norms: of q's and k's heads. has_biases: of W_qkv. is_latent: W_qkv has rows of q_nope and q_rope of each
    head, then of the latent; kv_heads: groups of 8 heads.
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
        """The shape as Triton's hooks can write it."""
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
        """Columns of W_down, of all experts of a token."""
        return self.intermediate * self.chosen

    @property
    def splits(self) -> int:
        """Programs that share the keys of a KV head, a power of two."""
        return 1 << max(self.programs // self.kv_heads, 1).bit_length() - 1

    def tiles(self, n: int) -> int:
        """Tiles of 8 rows of W that a program multiplies at most, of n rows."""
        return -(-n // 8 // self.programs)

    @property
    def columns(self) -> int:
        """Columns of W in a slot, but for the router's, which has CHUNK."""
        return 2 * CHUNK if self.is_e4m3 else CHUNK

    def order(self, n: int, k: int, times: int) -> str:
        """How a program goes through W (n, k), or gate and up: some "tiles" at a time, whole ones.

        Long rows of two tiles would fill the ring. So it takes a chunk of all its tiles at a time ("chunks"), where
        the ring has twice as many slots, or else of two ("pairs").
        """
        if -(-k // CHUNK) < MAX_CHUNKS:
            return "tiles"
        return "chunks" if times == 1 and self.tiles(n) <= self.slots // 2 else "pairs"

    def is_by_pieces(self, k: int) -> bool:
        """Whether a program receives and multiplies a vector of k numbers a PIECE at a time."""
        return k > 2 * PIECE

    def tiles_at_once(self, n: int, k: int, times: int, columns: int) -> int:
        """Tiles that a program multiplies together: all, or pairs. times: of so many W."""
        count, chunks = self.tiles(n) * times, -(-k // columns)
        return count if count * chunks <= SLOTS_AT_ONCE else max(SLOTS_AT_ONCE // 2 // chunks, 1) * 2

    def chunks_at_once(self, n: int, k: int, columns: int) -> int:
        """Chunks of W (n, k) that a program multiplies together, of all its tiles."""
        count, tiles = -(-k // columns), self.tiles(n)
        return count if count * tiles <= SLOTS_AT_ONCE else max(SLOTS_AT_ONCE // tiles, 1)

    @property
    def stages(self) -> tuple[tuple[int, int, int, int], ...]:
        """(n, k, how many W with rows like these, columns in a slot) of each GEMV."""
        columns = self.columns
        attention = (self.qkv, self.hidden, 1, columns), (self.hidden, self.attended, 1, columns)
        router = ((self.experts, self.hidden, 1, CHUNK),) if self.experts else ()
        return (*attention, *router, (self.inner, self.hidden, 2, columns), (self.hidden, self.inner, 1, columns))

    @property
    def most_tiles(self) -> int:
        """Sums of tiles that a program keeps, a power of two."""
        counts = []
        for n, k, times, columns in self.stages:
            of_order = {"chunks": 1, "pairs": 2}
            together = of_order.get(self.order(n, k, times)) or self.tiles_at_once(n, k, times, columns)
            counts.append(-(-self.tiles(n) * times // together) * together // times)
        return int(triton.next_power_of_2(max(counts)))

    @property
    def combined(self) -> int:
        """Dimensions of a KV head's queries that a program combines from all splits, a power of two.

        In groups that are none, not all programs have some.
        """
        value_dim = LATENT_RANK if self.is_latent else HEAD_DIM
        return int(triton.next_power_of_2(-(-self.group * value_dim // self.splits)))

    @property
    def combined_words(self) -> int:
        """What it reads for that: the dimensions, maximum and sum of each split; rounded up to a power of two."""
        if self.is_latent:  # the dimensions are one
            return self.splits * (self.combined + 2)
        return int(triton.next_power_of_2(self.splits * (self.combined + 2)))

    @property
    def head_rows(self) -> int:
        """Heads of q, k and v of a KV head, rounded up to a power of two."""
        return int(triton.next_power_of_2(self.group + 2))

    @property
    def norms(self) -> int:
        """Weights of a layer's norms: of attention, the MLP, latents or q and k, which may have ones."""
        return 2 * self.hidden + (LATENT_RANK if self.is_latent else 2 * HEAD_DIM)

    @property
    def head_dim(self) -> int:
        """Numbers of a query, by which scores are scaled."""
        return HEAD_DIM + ROPE_DIM if self.is_latent else HEAD_DIM

    @property
    def rotated(self) -> int:
        """Numbers of a head that are rotated."""
        return ROPE_DIM if self.is_latent else HEAD_DIM

    @property
    def most_chunks(self) -> int:
        """Chunks of the longest vector that a GEMV takes, or of a piece, whole slots of W."""
        lengths = (PIECE if self.is_by_pieces(k) else k for _, k, _, _ in self.stages)
        return max(-(-length // self.columns) for length in lengths) * self.columns // CHUNK

    @property
    def shared_bytes(self) -> int:
        """Shared memory of a program but for the slots; GEMVs and attention take turns. A test compares it."""
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
        """The shape with as many slots as there is room for; more than MAX_SLOTS gain nothing.

        Loads delay words of other programs: few are on their way where slots hold two whole stages, most where the
        weights of bfloat16 keep memory busy.
        """
        slots = min((HOPPERS_SHARED_BYTES - self.shared_bytes) // SLOT_BYTES, MAX_SLOTS)
        is_whole = all(2 * self.tiles(n) * times * -(-k // columns) <= slots for n, k, times, columns in self.stages)
        is_large = not self.is_e4m3 and not self.experts
        return replace(self, slots=slots, halves_ahead=3 if is_whole else 6 if is_large else 5)

    @property
    def layer_bytes(self) -> int:
        """Weights that a layer reads."""
        of_latents = 2 * self.heads * 2 * HEAD_DIM * LATENT_RANK if self.is_latent else 0
        return of_latents + sum(2 * CHUNK // columns * n * k * times for n, k, times, columns in self.stages)

    def fits(self) -> bool:
        """Whether the kernel takes this model: its vectors fill chunks, and no stage needs more slots than there are.

        Each program has rows of W_qkv, so that none overtakes another by more than a layer (`ll_protocol.py`).
        """
        inner = self.attended, self.hidden, self.inner
        has_chunks = all(k >= CHUNK and k % HEAD_DIM == 0 for k in inner) and self.qkv // 8 >= self.programs
        is_divided = self.combined <= HEAD_DIM
        has_programs = self.kv_heads <= self.programs and self.splits <= MAX_SPLITS
        has_heads = self.group <= 8 and TILE_KEYS % self.block_size == 0 and has_programs
        has_experts = self.intermediate % HEAD_DIM == 0 and (self.experts, self.chosen) in ((0, 1), (64, 8), (128, 8))
        lacks_scales = self.dense_layers or (self.experts and self.is_by_pieces(self.inner))  # of experts
        has_scales = not (self.is_e4m3 and lacks_scales)
        has_slots = all(self._has_slots(*each) for each in self.stages)
        parts = self.heads * LATENT_RANK // LATENT_ROWS if self.is_latent else 0  # a program's, of W_UK and of W_UV
        has_latents = parts <= self.programs and (not self.is_latent or (self.group == 8 and not self.is_e4m3))
        return has_chunks and is_divided and has_heads and has_experts and has_scales and has_slots and has_latents

    def _has_slots(self, n: int, k: int, times: int, columns: int) -> bool:
        order = self.order(n, k, times)
        if order == "tiles":
            return -(-k // columns) <= self.slots // 2
        return order == "chunks" or -(-k // CHUNK) <= MAX_PAIR_CHUNKS
