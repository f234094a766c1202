"""Names the content of blocks, so that several pools know which of their blocks are equal."""

from __future__ import annotations

from kvstore.layout import PoolGeometry


def content_name(geometry: PoolGeometry) -> str:
    """Return a name for the content of a pool's blocks: blocks of equal name and key are equal on any rank."""
    layout, heads, layers = geometry.layout, geometry.heads, geometry.shard.layers
    tokens = f"{geometry.block_size} tokens"
    name = f"{geometry.fingerprint}, {layout}, {tokens}, heads {heads.start} to {heads.stop - 1}"
    if len(layout.groups) > 1:
        name += f", groups of layers {[group.layers for group in layout.groups]}"
    return name if layers is None else f"{name}, layers {layers[0]} to {layers[1] - 1}"
