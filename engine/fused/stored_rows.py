"""Weights that a checkpoint stores otherwise than models ask for them: several in one tensor, heads in another order.

Models ask for q, k and v by name, and have half a head between the two numbers that are rotated together. A source
that can read parts of its tensors (`PartSource`) finds such a weight as rows of a stored one, so ranks and quantized
layouts need nothing of their own for it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from common.errors import UnsupportedModelError
from engine.layers.weights import Part
from engine.loader.checkpoint import Shape
from engine.models.config import ModelConfig
from engine.models.registry import Fused

ROTATED = ("q_proj", "k_proj")


@dataclass(frozen=True, slots=True)
class StoredRows:
    """A weight as rows of a stored one, which has `stored_rows`. head_order: indices of the rows of each head."""

    stored: str
    first: int
    num_rows: int
    stored_rows: int
    head_order: tuple[int, ...] = ()

    def part(self, part: Part) -> Part:
        """Where a part of the weight lies in the stored one."""
        rows, *columns = part
        return range(self.first + rows.start, self.first + rows.stop), *columns

    def order(self, num_rows: int) -> Tensor | None:
        """Return the order in which rows that were read, from the first of a head on, are used; None: as they are."""
        if not self.head_order:
            return None
        heads = torch.arange(0, num_rows, len(self.head_order))
        return (heads[:, None] + torch.tensor(self.head_order)).flatten()


def stored_rows(needed: Mapping[str, Shape], fused: Fused, config: ModelConfig) -> dict[str, StoredRows]:
    """The weights among `needed`, the whole model's, that do not lie as they are asked for."""
    found = {}
    order = rotary_order(config)
    for name, shape in needed.items():
        module, _, kind = name.rpartition(".")
        head_order = order if module.endswith(ROTATED) else ()
        for stored, parts in fused.items():
            layer = next((module.removesuffix(part) for part in parts if module.endswith("." + part)), None)
            if layer is None:
                continue
            names = [f"{layer}{part}.{kind}" for part in parts]
            sizes = [needed[each][0] for each in names]
            first = sum(sizes[: names.index(name)])
            found[name] = StoredRows(f"{layer}{stored}.{kind}", first, shape[0], sum(sizes), head_order)
            break
        else:
            if head_order:
                found[name] = StoredRows(name, 0, shape[0], shape[0], head_order)
    return found


def rotary_order(config: ModelConfig) -> tuple[int, ...]:
    """Return the order of a head's numbers, of which only the first are rotated, that puts pairs half a head apart.

    All scores stay what they were, since q and k are ordered alike; the table of angles has zeros for the rest.
    Raises UnsupportedModelError.
    """
    if config.rope.partial == 1:
        return ()
    if config.latent is not None or config.local_rope is not None or config.qk_norm:
        raise UnsupportedModelError("partial rotary embedding is supported for plain attention alone")
    rotated = config.rope.rotated(config.head_dim) // 2
    rest = range(2 * rotated, config.head_dim)
    middle = len(rest) // 2
    return (*range(rotated), *rest[:middle], *range(rotated, 2 * rotated), *rest[middle:])
