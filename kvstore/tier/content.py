"""Which blocks of several pools are equal: those of one key and one content."""

from __future__ import annotations

from kvstore.layout import PoolGeometry


def content_name(geometry: PoolGeometry) -> str:
    """Name of what a pool's blocks hold: blocks of equal name and key are equal, whichever rank wrote them."""
    layout, heads, layers = geometry.layout, geometry.heads, geometry.shard.layers
    tokens = f"{geometry.block_size} tokens"
    name = f"{geometry.fingerprint}, {layout}, {tokens}, heads {heads.start} to {heads.stop - 1}"
    if len(layout.groups) > 1:
        name += f", groups of layers {[group.layers for group in layout.groups]}"
    return name if layers is None else f"{name}, layers {layers[0]} to {layers[1] - 1}"
