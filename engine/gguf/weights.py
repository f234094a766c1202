"""Weights from a GGUF file, dequantized tensor by tensor with the `gguf` package.

Reorders q and k of Llama's files, and subtracts the one that Gemma's files add to norms; `engine/gguf/names.py` maps
the names.
"""

from __future__ import annotations

import math
import mmap
from collections.abc import Collection
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from common.errors import ConfigError, UnsupportedModelError
from common.gguf.header import GgufTensor
from common.gguf.parts import read_gguf
from engine.fused.stored_rows import ROTATED, StoredRows, rotary_order
from engine.gguf.block_rows import BITS, block_rows
from engine.gguf.composed import composed_weights
from engine.gguf.names import NO_WEIGHTS, locate
from engine.layers.weights import CHOICE_BIAS, Part, PartSource
from engine.loader.checkpoint import Shape
from engine.models.config import ModelConfig
from engine.quantization.quantized_rows import QuantizedRows
from kernels.gguf.library import library
from kernels.gguf.linear import BLOCK_COLUMNS, Blocks, BlockWeight

NUMBERS_AT_ONCE = 1 << 17  # numbers dequantized at a time, so that temporaries stay in a cache


def _mapped(path: Path) -> mmap.mmap:
    """Map a file copy-on-write: torch needs writable arrays, although nothing writes."""
    with path.open("rb") as file:
        return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)


def _dequantized(raw: Any, quantization: Any) -> Any:
    """Dequantize a tensor's bytes to a flat, writable float32 array. Raises NotImplementedError."""
    from gguf.constants import GGML_QUANT_SIZES
    from gguf.quants import dequantize

    if raw.dtype != np.uint8:  # plain types: views of the file
        return np.array(raw, np.float32).reshape(-1)
    block_size, block_bytes = GGML_QUANT_SIZES[quantization]
    blocks = raw.reshape(-1, block_bytes)
    values = np.empty(len(blocks) * block_size, np.float32)
    step = NUMBERS_AT_ONCE // block_size
    for first in range(0, len(blocks), step):  # as one row: the library splits more rows into groups of 16
        some = blocks[first : first + step].reshape(1, -1)
        values[first * block_size : (first + step) * block_size] = dequantize(some, quantization)[0]
    return values


class GgufFile:
    """A memory-mapped GGUF file, or the parts of a split one: metadata, and single tensors in float32."""

    def __init__(self, path: Path) -> None:
        contents = read_gguf(path)
        self.files = contents.files
        self.metadata = contents.metadata
        self.tensors = contents.tensors
        self._file_of = contents.file_of
        self._data = {path: _mapped(path) for path in contents.files}

    def read(self, name: str, rows: range | None = None) -> Tensor:
        """Dequantize one tensor, or some of its rows, to float32. Raises UnsupportedModelError for unknown types."""
        tensor = self.tensors[name]
        raw, quantization = self._raw(tensor)
        raw = raw if rows is None else raw[rows.start : rows.stop]
        try:
            values = _dequantized(raw, quantization)
        except NotImplementedError as error:
            raise UnsupportedModelError(
                f"tensor {name} has type {quantization.name}, which is not supported"
            ) from error
        return torch.from_numpy(values.reshape(tensor.shape if rows is None else (-1, tensor.shape[-1])))

    def bits_of(self, name: str) -> int:
        """Return the bits of a tensor that `read_packed` supports, else 0."""
        return BITS.get(self.tensors[name].type_id, 0)

    def read_packed(self, name: str, rows: range) -> QuantizedRows:
        """Read rows of a tensor in blocks of few bits, without dequantizing."""
        return block_rows(self.read_bytes(name, rows), self.tensors[name].type_id)

    def read_bytes(self, name: str, rows: range) -> Tensor:
        """Read rows of a tensor in its blocks: uint8 (rows, bytes of a row)."""
        raw, _ = self._raw(self.tensors[name])
        return torch.from_numpy(raw[rows.start : rows.stop].copy())

    def blocks(self, name: str, rows: range) -> Blocks:
        """Return rows of a tensor in blocks, within the mapped file."""
        raw, _ = self._raw(self.tensors[name])
        return Blocks(torch.from_numpy(raw[rows.start : rows.stop]), self.tensors[name].type_id)

    def _raw(self, tensor: GgufTensor) -> tuple[Any, Any]:
        """Return the tensor's bytes as `gguf.quants.dequantize` takes them, and its type."""
        from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

        try:
            quantization = GGMLQuantizationType(tensor.type_id)
        except ValueError:
            raise UnsupportedModelError(f"tensor {tensor.name} has the unknown type {tensor.type_id}") from None
        path = self._file_of[tensor.name]
        data = self._data[path]
        block_size, block_bytes = GGML_QUANT_SIZES[quantization]
        rows = int(np.prod(tensor.shape[:-1]))
        row_bytes = tensor.shape[-1] // block_size * block_bytes
        if tensor.shape[-1] % block_size or tensor.offset + rows * row_bytes > len(data):
            raise ConfigError(f"tensor {tensor.name} does not fit into {path.name}: the file is damaged")
        raw = np.frombuffer(data, np.uint8, rows * row_bytes, tensor.offset).reshape(rows, row_bytes)
        plain = {GGMLQuantizationType.F32: np.float32, GGMLQuantizationType.F16: np.float16}.get(quantization)
        return (raw if plain is None else raw.view(plain)), quantization


class GgufWeights(PartSource):
    """The weights of a GGUF file under Hugging Face names, cast to `dtype` on `device`.

    kept_bits: see BlockSource.
    """

    label = "gguf"  # the quantization mode that users see

    def __init__(
        self, file: GgufFile, config: ModelConfig, permuted: bool, dtype: torch.dtype, device: torch.device
    ) -> None:
        self._file = file
        self._config = config
        self._permuted = permuted
        self._dtype = dtype
        self._device = device
        self.kept_bits: Collection[int] = ()
        self._head_order = rotary_order(config)
        self._adds_one = config.architecture == "Gemma3ForCausalLM"
        self.composed = composed_weights(file.tensors, config.architecture)
        taken = {*NO_WEIGHTS, *(name for composed in self.composed.values() for name in composed.stored)}
        self._located = {
            hf: located
            for name, tensor in file.tensors.items()
            if name not in taken
            for hf, located in locate(name, tensor.shape, config)
        }
        self.shapes: dict[str, Shape] = {hf: located.shape for hf, located in self._located.items()}
        self.shapes |= {hf: composed.shape for hf, composed in self.composed.items()}

    def has_most_in(self, bits: Collection[int]) -> bool:
        """See BlockSource."""
        matrices = [name for name, tensor in self._file.tensors.items() if len(tensor.shape) > 1]
        return sum(self._file.bits_of(name) in bits for name in matrices) * 2 > len(matrices)

    @property
    def has_most_in_blocks(self) -> bool:
        """Whether most numbers of matrices are of types that `kernels/gguf` reads."""
        matrices = [tensor for tensor in self._file.tensors.values() if len(tensor.shape) > 1]
        sizes = {tensor.name: math.prod(tensor.shape) for tensor in matrices}
        in_blocks = sum(sizes[tensor.name] for tensor in matrices if tensor.type_id in BLOCK_COLUMNS)
        return in_blocks * 2 > sum(sizes.values())

    def has_blocks(self, name: str) -> bool:
        """Whether `blocks` supports the weight."""
        return name in self._located and self._file.tensors[self._located[name].stored].type_id in BLOCK_COLUMNS

    def has_expert_blocks(self, name: str, num_columns: int) -> bool:
        """Whether `expert_blocks` supports the stacked weight with `num_columns` columns."""
        composed = self.composed.get(name)
        if composed is None or len(composed.shape) != 3:
            return False
        sizes = [BLOCK_COLUMNS.get(self._file.tensors[stored].type_id, 0) for stored in composed.stored]
        return all(size and num_columns % size == 0 for size in sizes)

    def expert_blocks(self, name: str, expert: int, columns: range, rows: range) -> list[Blocks]:
        """Return outputs `rows` of an expert of a stacked weight for its inputs `columns`, in the file's blocks.

        Gate and up, whose outputs alternate in the weight, are separate tensors, one after the other.
        """
        composed, found = self.composed[name], []
        for stored, count in zip(composed.stored, composed.rows, strict=True):
            first, last = (expert * count + end // len(composed.stored) for end in (rows.start, rows.stop))
            blocks = self._file.blocks(stored, range(first, last))
            row_bytes, num_columns = blocks.rows.shape[1], self._file.tensors[stored].shape[-1]
            begin, end = (column * row_bytes // num_columns for column in (columns.start, columns.stop))
            found.append(replace(blocks, rows=blocks.rows[:, begin:end]))
        return found

    def blocks(self, name: str, part: Part | None = None) -> Blocks | None:
        """Return a weight, or a part of it, in the file's blocks; None if the part starts or ends within a block.

        Copied only if its rows are reordered or end in padding.
        """
        located = self._located[name]
        found = self._file.blocks(located.stored, located.rows)
        whole = self._in_order(name, found.rows)
        rows, columns = part or map(range, self.shapes[name])
        if columns.start % BLOCK_COLUMNS[found.type_id] or columns.stop % BLOCK_COLUMNS[found.type_id]:
            return None
        first, last = (end * whole.shape[1] // self.shapes[name][1] for end in (columns.start, columns.stop))
        cut = whole[rows.start : rows.stop, first:last]
        if padding := len(rows) - len(cut):
            cut = functional.pad(cut, (0, 0, 0, padding))
        return replace(found, rows=cut)

    def is_packed(self, name: str) -> bool:
        """See BlockSource."""
        return name in self._located and self._file.bits_of(self._located[name].stored) in self.kept_bits

    def rows(self, name: str, part: Part | None = None) -> QuantizedRows:
        """See BlockSource; blocks that are cut become smaller groups."""
        located = self._located[name]
        whole = self._file.read_packed(located.stored, located.rows).map(lambda tensor: self._in_order(name, tensor))
        rows, columns = part or map(range, self.shapes[name])
        return whole.cut_columns(columns).cut_rows(rows).map(lambda tensor: tensor.to(self._device))

    def take_part(self, name: str, part: Part) -> Tensor:
        """See PartSource. Dequantizes the whole tensor."""
        dtype = torch.float32 if name.endswith(CHOICE_BIAS) else self._dtype
        if name in self.composed:
            return self.composed[name].read(self._file.read, part, dtype).to(self._device).contiguous()
        if self.is_packed(name):
            return self.rows(name, part).dequantize(self._dtype)
        located = self._located[name]
        blocks = self.blocks(name) if self.has_blocks(name) and self._dtype == torch.bfloat16 else None
        if blocks is not None and library() is not None:
            weight = BlockWeight([blocks], located.shape[-1]).dequantize()
        else:
            weight = self._in_order(name, self._file.read(located.stored, located.rows).view(located.shape))
        if self._adds_one and name.endswith("norm.weight"):
            weight = weight - 1
        found = weight[tuple(slice(indices.start, indices.stop) for indices in part)]
        return found.to(device=self._device, dtype=dtype, copy=True, memory_format=torch.contiguous_format)

    def _in_order(self, name: str, rows: Tensor) -> Tensor:
        if self._permuted and ".self_attn.q_proj." in name:
            return unpermute(rows, self._config.num_heads)
        if self._permuted and ".self_attn.k_proj." in name:
            return unpermute(rows, self._config.num_kv_heads)
        if self._head_order and name.rpartition(".")[0].endswith(ROTATED):
            return rows[StoredRows(name, 0, len(rows), len(rows), self._head_order).order(len(rows))]
        return rows


def unpermute(weight: Tensor, num_heads: int) -> Tensor:
    """Reorder each head's rows from interleaved (x0, y0, x1, y1, ...) to halves (x0, x1, ..., y0, y1, ...)."""
    half = weight.shape[0] // num_heads // 2
    return weight.view(num_heads, half, 2, *weight.shape[1:]).transpose(1, 2).reshape(weight.shape)
