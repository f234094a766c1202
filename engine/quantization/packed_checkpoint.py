"""Weights of a quantized checkpoint: finds the tensors of each linear layer and checks them before any is read.

A rank reads only its rows and columns of a weight:

    part       the rows and columns that are wanted
    cut        the smallest range around them at which all tensors of the layer can be cut; read as a smaller layer
    the rest   is cut off after unpacking

Layouts are known only by `Stored.axes`. Reordered columns (act-order) are read whole.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from torch import Tensor

from common.errors import ConfigError
from engine.fused.stored_rows import StoredRows
from engine.layers.weights import Part, PartSource
from engine.loader.checkpoint import Shape, check_weights
from engine.loader.safetensors import SafetensorsWeights, StoredTensor
from engine.quantization.formats.scheme import (
    MARKS,
    UNUSED,
    WHOLE,
    CheckpointQuantization,
    K,
    N,
    Stored,
    WeightScheme,
)
from engine.quantization.quantized_rows import QuantizedRows

WEIGHT = ".weight"
BIAS = "bias"
GROUP_INDICES = ("g_idx", "weight_g_idx")
ReadPart = Callable[[str, Part | None], Tensor]


@dataclass(frozen=True, slots=True)
class _Packed:
    """A quantized weight whose tensors fit `scheme`. shape: of the stored weight, which may have more rows."""

    scheme: WeightScheme
    shape: tuple[int, int]
    module: str
    lies: StoredRows | None = None


class PackedWeights(PartSource):
    """Weights of a quantized checkpoint. Call `check` before anything is taken."""

    def __init__(
        self, tensors: SafetensorsWeights, quantization: CheckpointQuantization, rows: Mapping[str, StoredRows]
    ) -> None:
        """rows: weights that are rows of a stored one."""
        self.quantization = quantization
        self._lies = rows
        self._tensors = tensors
        self._modules = _by_module(tensors.tensors)
        self._packed: dict[str, _Packed] = {}
        self._idle_biases: list[str] = []

    def check(self, needed: Mapping[str, Shape], tied: bool, unused: tuple[str, ...] = ()) -> None:
        """Find the scheme of each quantized weight. Raises ConfigError, which names everything that does not fit."""
        found = self._tensors.shapes
        problems = []
        held: dict[str, list[str]] = {}  # names by the stored weight's name
        for name, lies in self._lies.items():
            held.setdefault(lies.stored, []).append(name)
        for module, parts in self._modules.items():
            name = module + WEIGHT
            names = held.get(name, [name])
            shape = needed.get(name)
            if shape is None and names[0] in needed:
                shape = (self._lies[names[0]].stored_rows, *needed[names[0]][1:])
            if shape is None or len(shape) != 2 or not any(mark in parts for mark in MARKS):
                continue
            scheme, misfits = self._scheme(parts, shape[0], shape[1])
            if scheme is None:
                problems.append(f"{module}: {misfits}")
                understood = [part for part in parts if part != BIAS]
            else:
                for each in names:
                    self._packed[each] = _Packed(scheme, (shape[0], shape[1]), module, self._lies.get(each))
                understood = [*scheme.tensors(shape[0], shape[1], parts), *UNUSED]
                if BIAS in parts and f"{module}.{BIAS}" not in needed:
                    self._idle_biases.append(f"{module}.{BIAS}")
                    understood.append(BIAS)
            for part in understood:
                found.pop(f"{module}.{part}", None)
            found |= {each: needed[each] for each in names}
        check_weights(needed, found, tied, unused, problems)

    def _scheme(self, parts: Mapping[str, StoredTensor], n: int, k: int) -> tuple[WeightScheme | None, str]:
        """Return the first scheme that the tensors fit, or None and why none fits."""
        misfits = []
        for scheme in self.quantization.schemes:
            misfit = _misfit(scheme.tensors(n, k, parts), parts)
            if misfit is None:
                return scheme, ""
            misfits.append(misfit)
        return None, " or ".join(dict.fromkeys(misfits))

    def is_packed(self, name: str) -> bool:
        return name in self._packed

    def rows(self, name: str, part: Part | None = None) -> QuantizedRows:
        """Return the rows of a weight, or of a part of it. Raises ConfigError for invalid values."""
        packed = self._packed[name]
        module, lies = packed.module, packed.lies
        if lies is not None:
            part = lies.part(part or (range(lies.num_rows), range(packed.shape[1])))

        def read(tensor: str, indices: Part | None) -> Tensor:
            return self._tensors.read(f"{module}.{tensor}", indices)

        try:
            rows = unpack_part(packed.scheme, *packed.shape, read, self._modules[module], part)
        except ConfigError as error:
            raise ConfigError(f"quantized weights: {module}: {error}") from error
        order = None if lies is None else lies.order(rows.values.shape[0])
        return rows if order is None else rows.take_rows(order.to(rows.values.device))

    def order(self, name: str) -> Tensor | None:
        """Return a weight's columns sorted by group, see `QuantizedRows`. Raises ConfigError."""
        packed = self._packed[name]
        module = packed.module
        for part in GROUP_INDICES:
            if part in self._modules[module]:
                return packed.scheme.column_order(packed.shape[1], self._tensors.read(f"{module}.{part}"))
        return None

    def take_part(self, name: str, part: Part) -> Tensor:
        """See PartSource."""
        if name in self._packed:
            return self.rows(name, part).dequantize(self._tensors.dtype)
        return self._tensors.take_part(name, part)

    def check_idle_biases(self) -> None:
        """Check biases that the model lacks: some tools store zeros. Raises ConfigError for others."""
        for name in self._idle_biases:
            if bool(self._tensors.read(name).any()):
                raise ConfigError(f"{name} is not zero, but the model's config has no such bias")


def _by_module(tensors: Mapping[str, StoredTensor]) -> dict[str, dict[str, StoredTensor]]:
    """Group tensors: model.layers.0.mlp.up_proj -> {qweight: ..., scales: ...}."""
    modules: dict[str, dict[str, StoredTensor]] = {}
    for name, tensor in tensors.items():
        module, _, part = name.rpartition(".")
        modules.setdefault(module, {})[part] = tensor
    return modules


def _misfit(stored: Mapping[str, Stored], found: Mapping[str, StoredTensor]) -> str | None:
    """Describe the first tensor that is missing or wrong."""
    for part, expected in stored.items():
        tensor = found.get(part)
        if tensor is None:
            if not expected.is_optional:
                return f"{part} is missing"
        elif tensor.shape not in expected.shapes:
            return f"{part} is {list(tensor.shape)}, not {list(expected.shapes[0])}"
        elif tensor.type_name not in expected.types:
            return f"{part} holds {tensor.type_name}, not {' or '.join(expected.types)}"
    return None


def unpack_part(
    scheme: WeightScheme, n: int, k: int, read: ReadPart, found: Mapping[str, object], part: Part | None = None
) -> QuantizedRows:
    """Unpack rows and columns of an (n, k) layer whose tensors `scheme.tensors` accepted; part None: all.

    Rows beyond n are zeros. Raises ConfigError for invalid values.
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
    if cut[K] != range(k):  # contiguous groups need no indices
        present = {name: tensor for name, tensor in present.items() if name not in GROUP_INDICES}

    def read_cut(name: str) -> Tensor:
        return read(name, _indices(stored[name], cut))

    unpacked = scheme.rows(len(cut[N]), len(cut[K]), read_cut, present)
    return unpacked.cut_columns(_within(columns, cut[K])).cut_rows(_within(rows, cut[N]))


def _has_order(scheme: WeightScheme, k: int, read: ReadPart, present: Mapping[str, Stored]) -> bool:
    return any(name in present and scheme.column_order(k, read(name, None)) is not None for name in GROUP_INDICES)


def _unit(tensors: Iterable[Stored], axis: int) -> int:
    """Return the unit of cuts along an axis."""
    return math.lcm(*(unit for stored in tensors for along, unit in stored.axes if along == axis and unit != WHOLE))


def _around(wanted: range, unit: int, size: int) -> range:
    start, stop = min(wanted.start, size - 1), min(wanted.stop, size)
    return range(start // unit * unit, min(-(-stop // unit) * unit, size))


def _within(wanted: range, cut: range) -> range:
    return range(wanted.start - cut.start, wanted.stop - cut.start)


def _indices(stored: Stored, cut: list[range]) -> Part:
    """Return the cut's indices in a tensor, which may have fewer dimensions, or one index for all rows."""
    return tuple(
        range(1) if unit == WHOLE else range(cut[along].start // unit, -(-cut[along].stop // unit))
        for along, unit in stored.axes
    )
