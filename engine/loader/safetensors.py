"""Weights from a Hugging Face directory: `model.safetensors`, or shards named by an index."""

from __future__ import annotations

import json
import operator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from common.errors import ConfigError
from engine.layers.weights import CHOICE_BIAS, Part, PartSource
from engine.loader.checkpoint import Shape

INDEX_NAME, SINGLE_NAME = "model.safetensors.index.json", "model.safetensors"
MAX_HEADER_BYTES = 100 << 20
PLAIN_TYPES = ("F64", "F32", "F16", "BF16")


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """One tensor in a file's header. `type_name` is safetensors' name of its type: BF16, I32, F8_E4M3, ..."""

    path: Path
    shape: Shape
    type_name: str
    first_byte: int  # in the file
    end_byte: int


class SafetensorsWeights(PartSource):
    """Reads single tensors from memory-mapped files; casts to `dtype` and moves to `device`."""

    def __init__(self, directory: Path, dtype: torch.dtype, device: torch.device) -> None:
        self.files = weight_files(directory)
        self.dtype = dtype
        self.device = device
        self.tensors: dict[str, StoredTensor] = {}
        for path in self.files:
            self.tensors.update(read_header(path))
        # A model without a head, which embedding models are published as, omits "model." in its weights' names.
        self.prefix = "model." if "embed_tokens.weight" in self.tensors else ""
        self.tensors = {self.prefix + name: tensor for name, tensor in self.tensors.items()}
        self._open_files: dict[Path, Any] = {}

    @property
    def shapes(self) -> dict[str, Shape]:
        return {name: tensor.shape for name, tensor in self.tensors.items()}

    def read(self, name: str, part: Part | None = None) -> Tensor:
        """Read a tensor, or a part of it, in its stored type, to the device."""
        return self._open(name, part).to(device=self.device, copy=True, memory_format=torch.contiguous_format)

    def take_part(self, name: str, part: Part) -> Tensor:
        """See PartSource."""
        type_name = self.tensors[name].type_name
        if type_name not in PLAIN_TYPES:
            raise ConfigError(f"{name} holds {type_name} numbers, but config.json says nothing of quantization there")
        # `copy=True`: a tensor that already has the right type would keep the file mapped and be read lazily.
        dtype = torch.float32 if name.endswith(CHOICE_BIAS) else self.dtype
        return self._open(name, part).to(
            device=self.device, dtype=dtype, copy=True, memory_format=torch.contiguous_format
        )

    def _open(self, name: str, part: Part | None = None) -> Tensor:
        return self._open_in(self.tensors[name].path, name, self.tensors[name].shape, part)

    def _open_in(self, path: Path, name: str, shape: Shape, part: Part | None) -> Tensor:
        """Open a file once and read from it. part: extra dimensions at its end are ignored."""
        from safetensors import SafetensorError, safe_open

        ranges = (part or ())[: len(shape)]
        name = name.removeprefix(self.prefix)
        try:
            if path not in self._open_files:
                self._open_files[path] = safe_open(path, framework="pt", device="cpu")
            file = self._open_files[path]
            if all(map(operator.eq, map(len, ranges), shape)):
                tensor: Tensor = file.get_tensor(name)
            else:
                tensor = file.get_slice(name)[tuple(slice(indices.start, indices.stop) for indices in ranges)]
        except (SafetensorError, OSError) as error:
            raise ConfigError(f"{path.name} is damaged: {name} cannot be read from it") from error
        return tensor


def weight_files(directory: Path) -> list[Path]:
    """List the safetensors files of a directory. Raises ConfigError if there are none or shards are missing."""
    index = directory / INDEX_NAME
    if index.is_file():
        try:
            names = sorted({str(name) for name in json.loads(index.read_text())["weight_map"].values()})
        except (ValueError, KeyError, AttributeError, TypeError) as error:
            raise ConfigError(f"{INDEX_NAME} has no weight_map") from error
        if any(Path(name).name != name for name in names):
            raise ConfigError(f"{INDEX_NAME} names files outside the model's directory")
    elif (directory / SINGLE_NAME).is_file():  # other files are adapters, or the same weights again
        names = [SINGLE_NAME]
    else:
        names = sorted(path.name for path in directory.glob("*.safetensors"))
    if not names:
        raise ConfigError(f"no .safetensors files in {directory.name} (other formats are not loaded)")
    missing = [name for name in names if not (directory / name).is_file()]
    if missing:
        raise ConfigError(f"{INDEX_NAME} names files that are missing: {', '.join(missing[:5])}")
    return [directory / name for name in names]


def read_header(path: Path) -> dict[str, StoredTensor]:
    """Read names, types and shapes (8 bytes of length, then JSON). Raises ConfigError if the file is damaged."""
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if not 2 <= length <= MAX_HEADER_BYTES:
            raise ConfigError(f"{path.name} is not a safetensors file")
        try:
            header = json.loads(file.read(length))
        except (ValueError, RecursionError) as error:
            raise ConfigError(f"{path.name}: the header is damaged") from error
    if not isinstance(header, dict):
        raise ConfigError(f"{path.name}: the header is damaged")
    data_bytes = path.stat().st_size - 8 - length
    tensors = {}
    for name, entry in header.items():
        if name == "__metadata__":
            continue
        match entry:
            case {"dtype": str(type_name), "shape": list(shape), "data_offsets": [int(first), int(end)]} if all(
                type(size) is int and size >= 0 for size in shape
            ):
                if not 0 <= first <= end <= data_bytes:
                    raise ConfigError(f"{path.name} is cut off or damaged: {name} does not lie inside it")
                tensors[name] = StoredTensor(path, tuple(shape), type_name, 8 + length + first, 8 + length + end)
            case _:
                raise ConfigError(f"{path.name}: the header is damaged at {name[:100]!r}")
    return tensors
