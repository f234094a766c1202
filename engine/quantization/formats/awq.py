"""AWQ: packed along the outputs; nibble i of a word is the word's output ORDER[i].

qweight int32 (k, n/8), qzeros int32 (k/g, n/8), scales (k/g, n)
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from engine.quantization.formats.scheme import (
    FLOATS,
    CheckpointQuantization,
    K,
    N,
    NotSupportedError,
    Read,
    Stored,
    WeightScheme,
    bits_of,
    group_size_of,
    num_words,
    unpack_words,
)
from engine.quantization.quantized_rows import QuantizedRows

ORDER = (0, 2, 4, 6, 1, 3, 5, 7)


@dataclass(frozen=True, slots=True)
class Awq(WeightScheme):
    """AWQ weights, always with zero points."""

    def tensors(self, n: int, k: int, found: Mapping[str, object]) -> dict[str, Stored]:
        groups, words, group = self.num_groups(k), num_words(n, self.bits), (K, self.block[1])
        return {
            "qweight": Stored(("I32",), ((k, words),), ((K, 1), (N, 8))),
            "qzeros": Stored(("I32",), ((groups, words),), (group, (N, 8))),
            "scales": Stored(FLOATS, ((groups, n),), (group, (N, 1))),
        }

    def rows(self, n: int, k: int, read: Read, found: Mapping[str, object]) -> QuantizedRows:
        values = _columns(read("qweight"))[:, :n].t()
        zeros = _columns(read("qzeros"))[:, :n].t()
        return self.integer_rows(k, values, read("scales").t().float(), zeros.float(), None, stores_middles=False)


def parse(config: Mapping[str, Any]) -> CheckpointQuantization:
    version = str(config.get("version") or "gemm").lower()
    if version != "gemm":
        raise NotSupportedError(f"AWQ in the layout {version!r}")
    bits = bits_of(config.get("bits", config.get("w_bit")), (4,), "AWQ")
    if config.get("zero_point", True) is not True:
        raise NotSupportedError("AWQ without zero points")
    return CheckpointQuantization("awq-4bit", (Awq(bits, (1, group_size_of(config)), False),))


def _columns(words: Tensor) -> Tensor:
    """Unpack int32 (rows, words) to uint8 (rows, words * 8), in the order of the outputs."""
    values = unpack_words(words, 4).view(words.shape[0], -1, 8)
    back = [ORDER.index(place) for place in range(8)]
    return values[..., back].flatten(1)
