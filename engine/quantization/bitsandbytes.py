"""Weights in bitsandbytes' layout, which Unsloth uses, too; they are dequantized when they are taken.

4 bits (NF4, FP4), in blocks of a weight's numbers in row-major order, the high half of a byte first:

    name                  uint8 (n k / 2, 1)
    name.quant_map        float32 (16,): the number of each 4-bit code, from -1 to 1
    name.absmax           float32, one per block; or uint8 codes of nested_quant_map, with blocks of their own
    name.nested_absmax    float32, one per nested block; nested_quant_map float32 (256,)
    name.quant_state.bitsandbytes__nf4   uint8, JSON: shape, blocksize, nested_blocksize, nested_offset

8 bits: name int8 (n, k), with SCB float32 (n,), the largest magnitude of each row; weight_format 0, row-major.
Blocks cross rows and the codes are not integers, so no GEMM reads the 4-bit layout directly.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from common.errors import ConfigError, UnsupportedModelError
from engine.fused.stored_rows import StoredRows
from engine.layers.weights import Part, PartSource
from engine.loader.checkpoint import Shape
from engine.loader.safetensors import SafetensorsWeights

METHOD = "bitsandbytes"
ABSMAX, SCB, FORMAT, STATE = ".absmax", "SCB", "weight_format", ".quant_state.bitsandbytes__"
PARTS_4BIT = (ABSMAX, ".quant_map", ".nested_absmax", ".nested_quant_map")
LARGEST_INT8 = 127


def is_bitsandbytes(config: Any) -> bool:
    """Whether a config.json's `quantization_config` is bitsandbytes'; older ones do not name a method."""
    return isinstance(config, Mapping) and (config.get("quant_method", METHOD) == METHOD) and bits_of(config) > 0


def bits_of(config: Mapping[str, Any]) -> int:
    """Return the bits of stored weights, or 0. Raises UnsupportedModelError for other 4-bit storage types."""
    storage = config.get("bnb_4bit_quant_storage", "uint8")
    if config.get("load_in_4bit") and storage != "uint8":
        raise UnsupportedModelError(
            f"bitsandbytes' 4 bits in numbers of {storage!r} are not supported (known: uint8)"
        )
    return 4 if config.get("load_in_4bit") else 8 if config.get("load_in_8bit") else 0


@dataclass(frozen=True, slots=True)
class _FourBits:
    """The state of a 4-bit weight."""

    shape: Shape
    block_size: int
    nested_block_size: int = 0
    nested_offset: float = 0.0


class BitsAndBytesWeights(PartSource):
    """A checkpoint with some quantized weights. Raises ConfigError for tensors that do not fit together."""

    def __init__(self, tensors: SafetensorsWeights, rows: Mapping[str, StoredRows]) -> None:
        """rows: weights that are rows of a stored one."""
        self._tensors = tensors
        self._four: dict[str, _FourBits] = {}
        self._eight: set[str] = set()
        self._lies: dict[str, StoredRows] = {}
        self.shapes: dict[str, Shape] = dict(tensors.shapes)
        for name in tensors.shapes:
            if name.endswith(ABSMAX) and name.removesuffix(ABSMAX) in tensors.shapes:
                self._add_four_bits(name.removesuffix(ABSMAX))
            elif name.endswith(f".{SCB}"):
                self._add_int8(name.removesuffix(SCB))
        for name, lies in rows.items():
            if lies.stored in self._four or lies.stored in self._eight:
                self._lies[name] = lies
                self.shapes[name] = (lies.num_rows, *self.shapes[lies.stored][1:])
        for stored in {lies.stored for lies in self._lies.values()} - self._lies.keys():
            del self.shapes[stored]

    def take_part(self, name: str, part: Part) -> Tensor:
        """See PartSource."""
        lies = self._lies.get(name)
        stored = name if lies is None else lies.stored
        if stored in self._four:
            whole = self._dequantized(stored, self._four[stored])
        elif stored in self._eight:
            scales = self._tensors.read(stored.removesuffix("weight") + SCB).float() / LARGEST_INT8
            whole = self._tensors.read(stored).float() * scales[:, None]
        else:
            return self._tensors.take_part(name, part)
        if lies is not None:
            part = lies.part(part)
        weight = whole[tuple(slice(indices.start, indices.stop) for indices in part)]
        order = None if lies is None else lies.order(weight.shape[0])
        weight = weight if order is None else weight[order.to(weight.device)]
        return weight.to(self._tensors.dtype).contiguous()

    def _add_four_bits(self, name: str) -> None:
        kind = next((kind for kind in ("nf4", "fp4") if name + STATE + kind in self.shapes), None)
        if kind is None:
            raise ConfigError(f"{name}: the state of a weight of 4 bits is missing")
        try:
            raw = json.loads(bytes(self._tensors.read(name + STATE + kind).tolist()))
            rows, columns = map(int, raw["shape"])
            nested = (int(raw["nested_blocksize"]), float(raw["nested_offset"])) if "nested_offset" in raw else ()
            state = _FourBits((rows, columns), int(raw["blocksize"]), *nested)
        except (ValueError, KeyError, TypeError) as error:
            raise ConfigError(f"{name}: the state of a weight of 4 bits is damaged") from error
        count, blocks = rows * columns, -(-rows * columns // max(state.block_size, 1))
        found = self._tensors.shapes
        if state.block_size < 1 or found[name] != (-(-count // 2), 1) or found[name + ABSMAX] != (blocks,):
            raise ConfigError(f"{name}: {found[name]} and its scales are no weight of {[rows, columns]} in 4 bits")
        self._four[name] = state
        for part in (*PARTS_4BIT, STATE + kind):
            self.shapes.pop(name + part, None)
        self.shapes[name] = state.shape

    def _add_int8(self, module: str) -> None:
        name, found = f"{module}weight", self._tensors.shapes
        if len(found.get(name, ())) != 2 or found[module + SCB] != found[name][:1]:
            raise ConfigError(f"{name} and its SCB are no weight of 8 bits")
        if module + FORMAT in found and bool(self._tensors.read(module + FORMAT).any()):
            raise ConfigError(
                f"{name} is stored for one kind of GPU (weight_format): save it again by a newer release"
            )
        self._eight.add(name)
        for part in (SCB, FORMAT):
            self.shapes.pop(module + part, None)

    def _dequantized(self, name: str, state: _FourBits) -> Tensor:
        """Dequantize a weight to float32 (n, k)."""
        read = self._tensors.read
        packed = read(name).flatten()
        halves = packed.new_empty(len(packed), 2)
        halves[:, 0], halves[:, 1] = packed >> 4, packed & 15
        count = state.shape[0] * state.shape[1]
        values = read(f"{name}.quant_map").float()[halves.flatten()[:count].int()]
        scales = read(name + ABSMAX)
        if state.nested_block_size:
            nested = read(f"{name}.nested_absmax").float().repeat_interleave(state.nested_block_size)[: len(scales)]
            scales = read(f"{name}.nested_quant_map").float()[scales.int()] * nested + state.nested_offset
        values *= scales.float().repeat_interleave(state.block_size)[:count]
        return values.view(state.shape)
