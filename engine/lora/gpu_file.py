"""Copies the tensors of a safetensors file to a GPU, all in one pass: an adapter has hundreds of small ones."""

from __future__ import annotations

import os
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from common.errors import ConfigError
from engine.loader.safetensors import PLAIN_TYPES, StoredTensor

PIECE_BYTES = 16 << 20
READERS = 4  # threads: one copies about 3 GB/s out of the page cache
TYPES = dict(zip(PLAIN_TYPES, (torch.float64, torch.float32, torch.float16, torch.bfloat16), strict=True))


class GpuFile:
    """Reads files through two pinned buffers: one is filled while the other one is copied."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._is_gpu = device.type == "cuda"
        self._pieces = [torch.empty(PIECE_BYTES, dtype=torch.uint8, pin_memory=self._is_gpu) for _ in range(2)]
        self._readers = ThreadPoolExecutor(READERS, "adapter-reader")
        self._hosts: list[Any] = [memoryview(piece.numpy()) for piece in self._pieces]  # type: ignore[arg-type]

    def copy(self, path: Path, stored: Iterable[StoredTensor]) -> list[Tensor]:
        """Return tensors of a file, of PLAIN_TYPES, on the device. Raises ConfigError if they do not lie in it."""
        try:
            content = self._content(path)
        except OSError as error:
            raise ConfigError(f"{path} cannot be read") from error
        return [_tensor_in(content, each) for each in stored]

    def _content(self, path: Path) -> Tensor:
        copied: list[Any] = [torch.cuda.Event() for _ in self._pieces] if self._is_gpu else []  # type: ignore[no-untyped-call]
        with path.open("rb", buffering=0) as file:
            content = torch.empty(path.stat().st_size, dtype=torch.uint8, device=self._device)
            first, turn = 0, 0
            while first < len(content):
                piece, host = self._pieces[turn % 2], self._hosts[turn % 2]
                if self._is_gpu:
                    copied[turn % 2].synchronize()  # an event that was not recorded is over
                count = self._read(file.fileno(), host[: len(content) - first], first)
                if not count:
                    break
                content[first : first + count].copy_(piece[:count], non_blocking=True)
                if self._is_gpu:
                    copied[turn % 2].record()
                first, turn = first + count, turn + 1
        return content[:first]

    def _read(self, file: int, host: Any, first_byte: int) -> int:
        """Fill `host` from that byte of the file on; return how many bytes it has. 0: at the file's end."""
        size = -(-len(host) // READERS)
        parts = [(start, host[start : start + size]) for start in range(0, len(host), size)]
        counts = list(self._readers.map(lambda part: os.preadv(file, [part[1]], first_byte + part[0]), parts))
        whole = next((index for index, (_, part) in enumerate(parts) if counts[index] < len(part)), len(parts))
        return sum(counts[: whole + 1])


def _tensor_in(content: Tensor, stored: StoredTensor) -> Tensor:
    dtype = TYPES[stored.type_name]
    part = content[stored.first_byte : stored.end_byte]
    if len(part) != prod(stored.shape) * dtype.itemsize:
        raise ConfigError(f"{stored.path} is damaged: a tensor of {list(stored.shape)} does not lie in it")
    if stored.first_byte % dtype.itemsize:
        part = part.clone()
    return part.view(dtype).view(stored.shape)
