"""Parts of quantized weights: each tensor of a layer is read where a rank's rows and columns are, and nowhere else.

    part       rows and columns that are wanted
    cut        the smallest range around them that all tensors of the layer can be cut at; read as a smaller layer
    the rest   is cut off once it is unpacked

Knows of a layout what `Stored.axes` says. Columns in another order (act-order) are read whole.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping

from torch import Tensor

from common.errors import ConfigError
from engine.layers.weights import Part
from engine.quantization.formats.scheme import WHOLE, K, N, Stored, WeightScheme
from engine.quantization.quantized_rows import QuantizedRows

ReadPart = Callable[[str, Part | None], Tensor]
GROUP_INDICES = ("g_idx", "weight_g_idx")


def unpack_part(
    scheme: WeightScheme, n: int, k: int, read: ReadPart, found: Mapping[str, object], part: Part | None = None
) -> QuantizedRows:
    """Rows and columns of an (n, k) layer whose tensors `scheme.tensors` accepted; part None: all.

    Rows beyond n are zeros. Raises ConfigError for values that cannot be.
    """
    stored = scheme.tensors(n, k, found)
    if "weight_shape" in stored and (shape := read("weight_shape", None).tolist()) != [n, k]:
        raise ConfigError(f"weight_shape is {shape}, not {[n, k]}")
    if part is None:
        return scheme.rows(n, k, lambda name: read(name, None), found)
    rows, columns = part
    present = {name: tensor for name, tensor in stored.items() if name in found}
    cut = [_around(rows, _unit(present.values(), N), n), _around(columns, _unit(present.values(), K), k)]
    if columns != range(k) and _has_order(scheme, k, read, present):
        cut[K] = range(k)
    if cut[K] != range(k):  # groups that follow each other
        present = {name: tensor for name, tensor in present.items() if name not in GROUP_INDICES}

    def read_cut(name: str) -> Tensor:
        return read(name, _indices(stored[name], cut))

    unpacked = scheme.rows(len(cut[N]), len(cut[K]), read_cut, present)
    return unpacked.cut_columns(_within(columns, cut[K])).cut_rows(_within(rows, cut[N]))


def _has_order(scheme: WeightScheme, k: int, read: ReadPart, present: Mapping[str, Stored]) -> bool:
    return any(name in present and scheme.column_order(k, read(name, None)) is not None for name in GROUP_INDICES)


def _unit(tensors: Iterable[Stored], axis: int) -> int:
    """What a cut must be a multiple of."""
    return math.lcm(*(unit for stored in tensors for along, unit in stored.axes if along == axis and unit != WHOLE))


def _around(wanted: range, unit: int, size: int) -> range:
    start, stop = min(wanted.start, size - 1), min(wanted.stop, size)
    return range(start // unit * unit, min(-(-stop // unit) * unit, size))


def _within(wanted: range, cut: range) -> range:
    return range(wanted.start - cut.start, wanted.stop - cut.start)


def _indices(stored: Stored, cut: list[range]) -> Part:
    """Where the cut lies in a tensor, which may have fewer dimensions. One that stands for all rows has one index."""
    return tuple(
        range(1) if unit == WHOLE else range(cut[along].start // unit, -(-cut[along].stop // unit))
        for along, unit in stored.axes
    )
