"""Weights from a Hugging Face directory: `model.safetensors`, or shards named by an index."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from common.errors import ConfigError
from engine.loader.checkpoint import Shape

INDEX_NAME = "model.safetensors.index.json"
MAX_HEADER_BYTES = 100 << 20


class SafetensorsWeights:
    """Reads single tensors from memory-mapped files; casts to `dtype` and moves to `device`."""

    def __init__(self, directory: Path, dtype: torch.dtype, device: torch.device) -> None:
        self.files = weight_files(directory)
        self._dtype = dtype
        self._device = device
        self._file_of: dict[str, Path] = {}
        self.shapes: dict[str, Shape] = {}
        for path in self.files:
            for name, entry in read_header(path).items():
                if name != "__metadata__":
                    self._file_of[name] = path
                    self.shapes[name] = tuple(entry["shape"])
        self._open_files: dict[Path, Any] = {}

    def take(self, name: str, shape: Shape) -> Tensor:
        from safetensors import safe_open

        path = self._file_of[name]
        if path not in self._open_files:
            self._open_files[path] = safe_open(path, framework="pt", device="cpu")
        tensor: Tensor = self._open_files[path].get_tensor(name)
        # `copy=True`: a tensor that already has the right type would keep the file mapped and be read lazily.
        return tensor.to(device=self._device, dtype=self._dtype, copy=True)


def weight_files(directory: Path) -> list[Path]:
    """The safetensors files of a directory. Raises ConfigError when there are none or shards are missing."""
    index = directory / INDEX_NAME
    if index.is_file():
        try:
            names = sorted(set(json.loads(index.read_text())["weight_map"].values()))
        except (ValueError, KeyError, AttributeError) as error:
            raise ConfigError(f"{INDEX_NAME} has no weight_map") from error
    else:
        names = sorted(path.name for path in directory.glob("*.safetensors"))
    if not names:
        raise ConfigError(f"no .safetensors files in {directory.name} (other formats are not loaded)")
    missing = [name for name in names if not (directory / name).is_file()]
    if missing:
        raise ConfigError(f"{INDEX_NAME} names files that are missing: {', '.join(missing[:5])}")
    return [directory / name for name in names]


def read_header(path: Path) -> dict[str, Any]:
    """Names, types, shapes and offsets: 8 bytes of length, then JSON. Raises ConfigError."""
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if not 2 <= length <= MAX_HEADER_BYTES:
            raise ConfigError(f"{path.name} is not a safetensors file")
        try:
            header = json.loads(file.read(length))
        except ValueError as error:
            raise ConfigError(f"{path.name}: the header is damaged") from error
    if not isinstance(header, dict):
        raise ConfigError(f"{path.name}: the header is damaged")
    return header
