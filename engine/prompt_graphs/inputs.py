"""Inputs of a graph of a step with prompts, as views of one buffer."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.gpu.prompt_graphs.split_tiles import WIDTH

TOKEN, POSITION, SLOT, SOURCE = range(4)  # rows of PromptInputs.fields, before the slots of the other KV groups
INDEX, ROW, LENGTH = range(3)  # rows of PromptInputs.samples


@dataclass(frozen=True, slots=True)
class PromptInputs:
    """Views of one int32 buffer on the host or on the device.

    fields: (3 + num_groups, num_tokens): token ids, positions, slots (-1: not stored), device rows whose last token
        replaces the token id (-1: none), and slots of the KV groups after the first.
    merges: (num_spare, 4), from `split_tiles`.
    tiles: (num_tiles, 4), from `prefill_tiles`, or (num_tiles + num_spare, WIDTH), from `split_tiles`; with device
        rows in place of rows.
    samples: (3, num_rows): index of the last token, device row (max_rows: padding), length (0: no sample).
    """

    fields: Tensor
    merges: Tensor
    tiles: Tensor
    samples: Tensor

    @classmethod
    def over(
        cls, buffer: Tensor, num_tokens: int, num_tiles: int, num_rows: int, num_groups: int = 1, num_spare: int = 0
    ) -> PromptInputs:
        shapes = [
            (3 + num_groups, num_tokens), (num_spare, 4), (num_tiles + num_spare, WIDTH if num_spare else 4),
            (3, num_rows),
        ]  # fmt: skip
        sizes = [height * width for height, width in shapes]
        parts = torch.split(buffer[: sum(sizes)], sizes)
        return cls(*(part.view(shape) for part, shape in zip(parts, shapes, strict=True)))

    @classmethod
    def size(cls, num_tokens: int, num_tiles: int, num_rows: int, num_groups: int = 1, num_spare: int = 0) -> int:
        """Return how many numbers `over` takes of a buffer."""
        width = WIDTH if num_spare else 4
        return (3 + num_groups) * num_tokens + width * (num_tiles + num_spare) + 4 * num_spare + 3 * num_rows
