"""The header of a GGUF file: metadata, and where each tensor's bytes are. Tensor data is not read.

Format (little endian): magic, version, counts, key-value pairs, tensor infos, padding, tensor data.

Parsed here because the `gguf` package builds an array object per string, which takes 1.6 s for a 49k-token
vocabulary; this takes 0.05 s. Every length in the file is checked against the rest of the file before memory is
allocated. Does not interpret keys.
"""

from __future__ import annotations

import mmap
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from common.errors import UnsupportedModelError

MAGIC = b"GGUF"
VERSIONS = (2, 3)
DEFAULT_ALIGNMENT = 32
MAX_ITEMS = 4_000_000  # keys, tensors or items of one array: far more than in any vocabulary
MAX_ARRAY_DEPTH = 2
MAX_DIMENSIONS = 4
_STRING, _ARRAY = 8, 9
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}


@dataclass(frozen=True, slots=True)
class GgufTensor:
    """One tensor: shape in torch's order (rows first), ggml type number, absolute offset in the file."""

    name: str
    shape: tuple[int, ...]
    type_id: int
    offset: int


@dataclass(frozen=True, slots=True)
class GgufHeader:
    """metadata: str, int, float, bool, or a list of one of them."""

    metadata: dict[str, Any]
    tensors: dict[str, GgufTensor]


def read_gguf_header(path: Path) -> GgufHeader:
    """Parse the header. Raises UnsupportedModelError if the file is not GGUF, cut off or damaged."""
    try:
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            return _Parser(data).header()
    except (ValueError, struct.error, OSError) as error:  # an empty file cannot be mapped: ValueError
        raise UnsupportedModelError(f"{path.name} is damaged or not a GGUF file: {error}") from error


class _Parser:
    """A cursor over the mapped file. Raises ValueError or struct.error for invalid contents."""

    def __init__(self, data: mmap.mmap) -> None:
        self._data = data
        self._at = len(MAGIC)

    def header(self) -> GgufHeader:
        if self._data[: len(MAGIC)] != MAGIC:
            raise ValueError("it does not begin as one")
        version = self._scalar("I")
        if version not in VERSIONS:
            raise ValueError(f"version {version} is not supported (known: 2, 3)")
        num_tensors, num_keys = self._count(), self._count()
        metadata = {}
        for _ in range(num_keys):
            key = self._string()
            metadata[key] = self._value(self._scalar("I"))
        infos = [self._tensor_info() for _ in range(num_tensors)]
        alignment = int(metadata.get("general.alignment", DEFAULT_ALIGNMENT))
        if alignment < 1:
            raise ValueError(f"its alignment is {alignment}")
        base = -(-self._at // alignment) * alignment
        tensors = {name: GgufTensor(name, shape, type_id, base + offset) for name, shape, type_id, offset in infos}
        return GgufHeader(metadata, tensors)

    def _tensor_info(self) -> tuple[str, tuple[int, ...], int, int]:
        name = self._string()
        num_dims = self._scalar("I")
        if num_dims > MAX_DIMENSIONS:
            raise ValueError(f"tensor {name!r} has {num_dims} dimensions")
        shape = tuple(reversed(self._scalars("Q", num_dims)))
        return name, shape, self._scalar("I"), self._scalar("Q")

    def _value(self, kind: int, depth: int = 0) -> Any:
        if kind == _STRING:
            return self._string()
        if kind in _SCALARS:
            return self._scalar(_SCALARS[kind])
        if kind != _ARRAY or depth == MAX_ARRAY_DEPTH:
            raise ValueError(f"unknown metadata type {kind}")
        item_kind, num_items = self._scalar("I"), self._count()
        if item_kind == _STRING:
            return self._strings(num_items)
        if item_kind in _SCALARS:
            return self._scalars(_SCALARS[item_kind], num_items)
        return [self._value(item_kind, depth + 1) for _ in range(num_items)]

    def _scalar(self, code: str) -> Any:
        return self._scalars(code, 1)[0]

    def _scalars(self, code: str, count: int) -> list[Any]:
        values = struct.unpack_from(f"<{count}{code}", self._data, self._at)
        self._at += struct.calcsize(f"<{count}{code}")
        return list(values)

    def _count(self) -> int:
        count: int = self._scalar("Q")
        if count > min(MAX_ITEMS, len(self._data) - self._at):  # each takes at least one byte
            raise ValueError(f"{count} items in what is left of it")
        return count

    def _string(self) -> str:
        return self._strings(1)[0]

    def _strings(self, count: int) -> list[str]:
        """Read strings with the cursor in a local variable: 50k in 20 ms."""
        data, size, at = self._data, len(self._data), self._at
        unpack_length = struct.Struct("<Q").unpack_from
        strings = []
        for _ in range(count):
            (length,) = unpack_length(data, at)
            at += 8 + length
            if at > size:
                raise ValueError("it ends in the middle of a string")
            strings.append(data[at - length : at].decode("utf-8", "replace"))
        self._at = at
        return strings
