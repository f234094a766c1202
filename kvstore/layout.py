"""The KV layout of a model and the geometry of its pools: plain data that models declare and workers compare.

    layout   = groups of layers with one shape and one lifetime
    geometry = layout x blocks x shard
    block    = block_size consecutive tokens of one group: layers x planes x heads of the shard x block_size x
               head_dim elements, with as many layers as the shard has of its largest group
               (docs/decisions/kv-blocks-and-groups.md)

A block is contiguous, and the heads of one layer and plane are next to each other in it, so that a reader with
another shard can pick the heads that it needs (`kvstore/handle/head_split.py`). Standard library only.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import Literal, get_args

from common.errors import ConfigError, UnsupportedModelError

KvKind = Literal["full", "window", "latent"]
SERVED: tuple[tuple[KvKind, int], ...] = (("full", 2), ("window", 2), ("latent", 1))  # supported kinds, with planes
DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "float8_e4m3fn": 1, "uint8": 1}
MAX_DIMENSION = 1 << 16


@dataclass(frozen=True, slots=True)
class KvGroup:
    """Layers whose KV has one shape and one lifetime.

    full: KV of every token. window: KV of the last `window` tokens. latent: one vector per token, which all heads
    share (MLA). Raises ConfigError for invalid or inconsistent fields.
    """

    name: str
    kind: KvKind
    layers: tuple[int, ...]  # indices of the model's layers, ascending
    num_kv_heads: int  # latent: 1
    head_dim: int
    dtype: str
    num_planes: int = 2  # K and V; latent: 1
    window: int = 0  # tokens; 0: no window

    def __post_init__(self) -> None:
        sizes = (len(self.layers), self.num_kv_heads, self.head_dim, self.num_planes)
        is_sound = (
            self.kind in get_args(KvKind)
            and self.dtype in DTYPE_BYTES
            and all(1 <= size <= MAX_DIMENSION for size in sizes)
            and list(self.layers) == sorted(set(self.layers))
            and 0 <= self.layers[0] <= self.layers[-1] < MAX_DIMENSION
            and (self.window > 0) == (self.kind == "window")
        )
        if not is_sound:
            raise ConfigError(f"a KV group {self.name[:64]!r} of impossible kind, data type or shape")

    def __str__(self) -> str:
        window = f" of {self.window}" if self.window else ""
        shape = f"{len(self.layers)} layers x {self.num_planes} x {self.num_kv_heads} heads x {self.head_dim}"
        return f"{self.kind}{window}: {shape} {self.dtype}"


@dataclass(frozen=True, slots=True)
class KvLayout:
    """All KV of one model, before it is divided among ranks. Its text form shows everything that workers compare."""

    groups: tuple[KvGroup, ...]

    @property
    def has_windows(self) -> bool:
        return any(group.window for group in self.groups)

    @property
    def num_layers(self) -> int:
        return sum(len(group.layers) for group in self.groups)

    def __str__(self) -> str:
        return "; ".join(map(str, self.groups))


def full_attention(num_layers: int, num_kv_heads: int, head_dim: int, dtype: str) -> KvLayout:
    """Return the layout of a model whose layers all attend to every token, with K and V of `num_kv_heads` heads."""
    return KvLayout((KvGroup("attention", "full", tuple(range(num_layers)), num_kv_heads, head_dim, dtype),))


def latent_attention(num_layers: int, width: int, dtype: str) -> KvLayout:
    """Return the layout of latent attention (MLA): per layer and token one vector, the latent and the rotated key."""
    return KvLayout((KvGroup("attention", "latent", tuple(range(num_layers)), 1, width, dtype, num_planes=1),))


@dataclass(frozen=True, slots=True)
class Shard:
    """The KV of one of `size` ranks among which the heads of a model or pipeline stage are divided (TP).

    layers: [first, stop) of the stage; None: all layers.
    """

    rank: int = 0
    size: int = 1
    layers: tuple[int, int] | None = None

    def heads(self, num_kv_heads: int) -> range:
        """Return this rank's heads: an equal share, or with more ranks than heads one replicated head.

        Raises ConfigError if neither number divides the other, or if there is no such rank.
        """
        if not 0 <= self.rank < self.size <= MAX_DIMENSION:
            raise ConfigError(f"rank {self.rank} of {self.size} does not exist")
        if self.size <= num_kv_heads and num_kv_heads % self.size == 0:
            count = num_kv_heads // self.size
            return range(self.rank * count, (self.rank + 1) * count)
        if self.size % num_kv_heads == 0:
            head = self.rank * num_kv_heads // self.size
            return range(head, head + 1)
        raise ConfigError(f"{num_kv_heads} KV heads cannot be divided among {self.size} ranks")

    def layers_of(self, layout: KvLayout) -> range:
        """Return the model's layers in this shard. Raises ConfigError for layers that the model does not have."""
        first, stop = self.layers or (0, layout.num_layers)
        if not 0 <= first < stop <= layout.num_layers:
            raise ConfigError(f"a stage of layers {first} to {stop - 1} of {layout.num_layers} does not exist")
        return range(first, stop)


WHOLE = Shard()


@dataclass(frozen=True)  # without slots, for the cached properties, which every pull reads
class PoolGeometry:
    """One rank's pool: `[num_blocks, layers of a group, planes, heads of the shard, block_size, head_dim]`.

    `fingerprint` identifies weights, config and quantization. KV can move between pools that differ only in
    `num_blocks` and `shard`. Raises UnsupportedModelError for an unsupported layout, ConfigError for a wrong shard.
    """

    layout: KvLayout
    num_blocks: int
    block_size: int
    fingerprint: str
    shard: Shard = WHOLE

    def __post_init__(self) -> None:
        if not 1 <= self.block_size <= MAX_DIMENSION:
            raise ConfigError(f"blocks of {self.block_size} tokens are impossible")
        self.shard.heads(self.group.num_kv_heads)
        self.shard.layers_of(self.layout)

    @cached_property
    def group(self) -> KvGroup:
        """The group with the most layers, which determines the shape of blocks. Groups differ in layers only."""
        groups = self.layout.groups
        shapes = {(group.num_kv_heads, group.head_dim, group.dtype, group.num_planes) for group in groups}
        layers = [layer for group in groups for layer in group.layers]
        is_served = all((group.kind, group.num_planes) in SERVED for group in groups)
        if is_served and len(shapes) == 1 and len(set(layers)) == len(layers):
            return max(groups, key=lambda group: len(group.layers))
        raise UnsupportedModelError(
            f"KV that is not of groups of one shape, of full or windowed attention with K and V or of latents, is "
            f"not supported yet: {self.layout}"
        )

    @property
    def heads(self) -> range:
        """Indices of the model's KV heads in this pool."""
        return self.shard.heads(self.group.num_kv_heads)

    @property
    def layers(self) -> range:
        """Indices of the model's layers in this pool."""
        return self.shard.layers_of(self.layout)

    @cached_property
    def block_layers(self) -> int:
        """Number of layers in a block: the most that any group has in this pool."""
        layers = self.layers
        return max(sum(layer in layers for layer in group.layers) for group in self.layout.groups)

    @property
    def dtype(self) -> str:
        return self.group.dtype

    def has_blocks_of(self, other: PoolGeometry) -> bool:
        """Whether blocks of both pools have the same bytes for the same tokens."""
        mine = self.block_size, self.fingerprint, self.shard, self.layout
        return mine == (other.block_size, other.fingerprint, other.shard, other.layout)

    @cached_property
    def block_shape(self) -> tuple[int, int, int, int, int]:
        group = self.group
        return (self.block_layers, group.num_planes, len(self.heads), self.block_size, group.head_dim)

    @cached_property
    def block_bytes(self) -> int:
        return math.prod(self.block_shape) * DTYPE_BYTES[self.dtype]

    @property
    def pool_bytes(self) -> int:
        return self.num_blocks * self.block_bytes


@dataclass(frozen=True, slots=True)
class HeadCopy:
    """A strided copy of bytes from one block to another, for i below `height`:

    target[i * target_pitch + target_offset :][:width] = source[i * source_pitch + source_offset :][:width]

    No range of `width` bytes crosses the end of a pitch, and the size of a block is a multiple of each pitch.
    """

    height: int
    width: int
    source_offset: int
    source_pitch: int
    target_offset: int
    target_pitch: int
