"""KV layout of a model and geometry of its pools: plain data that a model declares and workers compare.

    layout   = groups of layers with one shape and one lifetime
    geometry = layout x blocks x shard
    block    = block_size consecutive tokens of one group: layers x planes x heads of the shard x block_size x
               head_dim elements, as many layers as the largest group has, of the shard
               (docs/decisions/kv-blocks-and-groups.md)

A block is one contiguous piece, in which the heads of one layer and plane lie next to each other: so a
reader with another shard finds the heads that it wants (`kvstore/handle/head_split.py`). Standard library only.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import Literal, get_args

from common.errors import ConfigError, UnsupportedModelError

KvKind = Literal["full", "window", "latent"]
SERVED: tuple[tuple[KvKind, int], ...] = (("full", 2), ("window", 2), ("latent", 1))  # kind and planes of a group
DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "float8_e4m3fn": 1, "uint8": 1}
MAX_DIMENSION = 1 << 16


@dataclass(frozen=True, slots=True)
class KvGroup:
    """Layers whose KV has one shape and one lifetime.

    full: of every token. window: of the last `window` tokens. latent: one vector a token that all heads share (MLA).
    Raises ConfigError for what contradicts itself.
    """

    name: str
    kind: KvKind
    layers: tuple[int, ...]  # of the model, ascending
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
    """All KV of one model, before it is divided among ranks. Its text names what workers compare."""

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
    """The layout of a model whose layers all attend to every token, with K and V of `num_kv_heads` heads."""
    return KvLayout((KvGroup("attention", "full", tuple(range(num_layers)), num_kv_heads, head_dim, dtype),))


def latent_attention(num_layers: int, width: int, dtype: str) -> KvLayout:
    """The layout of latent attention (MLA): each layer keeps one vector a token, the latent and the rotated key."""
    return KvLayout((KvGroup("attention", "latent", tuple(range(num_layers)), 1, width, dtype, num_planes=1),))


@dataclass(frozen=True, slots=True)
class Shard:
    """The KV of one rank among `size` that share the heads (tensor parallelism) of a model or of a pipeline stage.

    layers: [first, stop) of the stage; None: all.
    """

    rank: int = 0
    size: int = 1
    layers: tuple[int, int] | None = None

    def heads(self, num_kv_heads: int) -> range:
        """The heads of this rank: an equal share, or one head that several ranks hold when there are more ranks.

        Raises ConfigError when neither number divides the other.
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
        """The model's layers that are this shard's. Raises ConfigError for layers that there are not."""
        first, stop = self.layers or (0, layout.num_layers)
        if not 0 <= first < stop <= layout.num_layers:
            raise ConfigError(f"a stage of layers {first} to {stop - 1} of {layout.num_layers} does not exist")
        return range(first, stop)


WHOLE = Shard()


@dataclass(frozen=True)  # without slots: what pulls ask for again and again is computed once
class PoolGeometry:
    """One rank's pool: `[num_blocks, layers of a group, planes, heads of the shard, block_size, head_dim]`.

    `fingerprint` names weights, config and quantization. KV may move between pools that agree in all but `num_blocks`
    and `shard`. Raises UnsupportedModelError for a layout that no pool serves, ConfigError for an impossible shard.
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
        """The group whose shape blocks have: no other has more layers, and in all else they are alike."""
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
        """Indices of the model's KV heads that the pool holds."""
        return self.shard.heads(self.group.num_kv_heads)

    @property
    def layers(self) -> range:
        """The model's layers that the pool holds."""
        return self.shard.layers_of(self.layout)

    @cached_property
    def block_layers(self) -> int:
        """Layers of a block: as many as any group has here."""
        layers = self.layers
        return max(sum(layer in layers for layer in group.layers) for group in self.layout.groups)

    @property
    def dtype(self) -> str:
        return self.group.dtype

    def has_blocks_of(self, other: PoolGeometry) -> bool:
        """Whether a block of `other` is one of this pool, byte for byte."""
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
