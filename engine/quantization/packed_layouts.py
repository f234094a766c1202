"""Layouts of quantized weights in the tensors of a checkpoint, and how to unpack them.

For a linear layer of n outputs and k inputs, groups of g inputs:

    gptq    qweight int32 (k bits/32, n), qzeros int32 (k/g, n bits/32), scales (k/g, n), g_idx (k,): inputs' groups.
            Packed along the inputs, first in the low bits; zero points along the outputs.
    awq     qweight int32 (k, n/8), qzeros int32 (k/g, n/8), scales (k/g, n).
            Packed along the outputs; nibble i of a word is output AWQ_ORDER[i] of its eight.
    packed  weight_packed int32 (n, k bits/32), weight_scale (n, k/g), weight_zero_point int32 (n bits/32, k/g),
            weight_shape, weight_g_idx. Packed along the inputs, zero points along the outputs, first in the low bits;
            both are signed numbers plus half the range.
    int8    weight int8 (n, k), weight_scale (), (1,), (n,) or (n, k/g), weight_zero_point int8.
    fp8     weight e4m3 (n, k), weight_scale like int8's or one per block; weight_scale_inv multiplies too.

Everywhere w = (value - zero point) * scale. Knows nothing of files: shapes are given, tensors are read by name.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from common.errors import ConfigError
from engine.quantization.quantized_rows import INT4_MIDDLE, QuantizedRows
from engine.quantization.schemes import WHOLE, WeightScheme

Shape = tuple[int, ...]
Read = Callable[[str], Tensor]
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
FLOATS = ("F16", "BF16", "F32")
INTS = ("I32", "I64")
# Tensors that show that a layer is quantized, even when others are missing.
MARKS = ("qweight", "weight_packed", "weight_scale", "weight_scale_inv")
# Scales of inputs that were measured beforehand. Here inputs are quantized with scales of their own, if at all.
UNUSED = ("input_scale", "activation_scale", "input_zero_point", "output_scale")
Axis = tuple[int, int]
"""Dimension of the weight (N or K), and how many of its rows or columns an index stands for; WHOLE: all of them."""
N, K = 0, 1


@dataclass(frozen=True, slots=True)
class Stored:
    """Requirements on one tensor of a layout: any of `shapes`. axes: of its dimensions; none: it is never cut."""

    types: tuple[str, ...]  # as safetensors names them
    shapes: tuple[Shape, ...]
    axes: tuple[Axis, ...] = ()
    is_optional: bool = False


def stored_tensors(scheme: WeightScheme, n: int, k: int, found: Mapping[str, object]) -> dict[str, Stored]:
    """The tensors of an (n, k) layer by the last part of their names. `found`: the names that are there."""
    bits, groups, in_word = scheme.bits, num_groups(scheme, k), 32 // scheme.bits
    rows, columns, group = (N, 1), (K, 1), (K, scheme.block[1])
    g_idx = Stored(INTS, ((k,),), (columns,), is_optional=True)
    if scheme.layout == "gptq":
        return {
            "qweight": Stored(("I32",), ((_words(k, bits), n),), ((K, in_word), rows)),
            "qzeros": Stored(("I32",), ((groups, _words(n, bits)),), (group, (N, in_word))),
            "scales": Stored(FLOATS, ((groups, n),), (group, rows)),
            "g_idx": g_idx,
        }
    if scheme.layout == "awq":
        return {
            "qweight": Stored(("I32",), ((k, _words(n, bits)),), (columns, (N, in_word))),
            "qzeros": Stored(("I32",), ((groups, _words(n, bits)),), (group, (N, in_word))),
            "scales": Stored(FLOATS, ((groups, n),), (group, rows)),
        }
    shapes, blocks = _scale_shapes(scheme, n, k), ((N, scheme.block[0]), group)
    scales = Stored(FLOATS, shapes, blocks)
    zeros = {} if scheme.is_symmetric else {"weight_zero_point": Stored(("I8",), shapes, blocks)}
    if scheme.layout == "packed":
        if zeros and scheme.block != (WHOLE, WHOLE):
            zeros = {"weight_zero_point": Stored(("I32",), ((_words(n, bits), groups),), ((N, in_word), group))}
        return {
            "weight_packed": Stored(("I32",), ((n, _words(k, bits)),), (rows, (K, in_word))),
            "weight_scale": scales,
            "weight_shape": Stored(INTS, ((2,),)),
            "weight_g_idx": g_idx,
            **zeros,
        }
    scale_name = "weight_scale_inv" if "weight_scale_inv" in found else "weight_scale"
    weight_type = "I8" if scheme.layout == "int8" else "F8_E4M3"
    return {"weight": Stored((weight_type,), ((n, k),), (rows, columns)), scale_name: scales, **zeros}


def unpack(scheme: WeightScheme, n: int, k: int, read: Read, found: Mapping[str, object]) -> QuantizedRows:
    """Tensors that `stored_tensors` accepted as rows. Raises ConfigError for values that cannot be."""
    if scheme.layout == "gptq":
        return _unpack_gptq(scheme, n, k, read, found)
    if scheme.layout == "awq":
        values = _awq_columns(read("qweight"))[:, :n].t()
        zeros = _awq_columns(read("qzeros"))[:, :n].t()
        return _integer_rows(scheme, k, values, read("scales").t().float(), zeros.float(), None)
    if scheme.layout == "packed":
        return _unpack_packed(scheme, n, k, read, found)
    stored = stored_tensors(scheme, n, k, found)
    scale_name = next(name for name in stored if name.startswith("weight_scale"))
    scales = _per_row(scheme, n, k, read(scale_name).float())
    offsets = None
    if "weight_zero_point" in stored:
        offsets = -_per_row(scheme, n, k, read("weight_zero_point").float()) * scales
    return _rows(scheme, k, read("weight"), scales, offsets, None)


def num_groups(scheme: WeightScheme, k: int) -> int:
    columns = scheme.block[1]
    return 1 if columns == WHOLE else -(-k // columns)


def unpack_words(words: Tensor, bits: int) -> Tensor:
    """int32 (rows, words) -> uint8 (rows, words * 32 / bits): values from the low bits up."""
    whole = (
        words.flatten().view(torch.uint8).view(words.shape[0], 4 * words.shape[1])
    )  # little endian: low bytes first
    if bits == 8:
        return whole
    return torch.stack([whole & 15, whole >> 4], dim=-1).flatten(1)


def _unpack_gptq(scheme: WeightScheme, n: int, k: int, read: Read, found: Mapping[str, object]) -> QuantizedRows:
    values = unpack_words(read("qweight").t(), scheme.bits)[:, :k]
    zero_words = read("qzeros")
    if scheme.subtracts_one:
        # Whole words, because the tool that subtracts does so: a zero point of 0 borrows from its neighbour.
        zero_words = zero_words + (0x11111111 if scheme.bits == 4 else 0x01010101)
    zeros = unpack_words(zero_words, scheme.bits)[:, :n].t()
    order = column_order(scheme, k, read("g_idx")) if "g_idx" in found else None
    return _integer_rows(scheme, k, values, read("scales").t().float(), zeros.float(), order)


def _unpack_packed(scheme: WeightScheme, n: int, k: int, read: Read, found: Mapping[str, object]) -> QuantizedRows:
    values = unpack_words(read("weight_packed"), scheme.bits)[:, :k]
    scales = _per_row(scheme, n, k, read("weight_scale").float())
    middle = 1 << (scheme.bits - 1)
    if scheme.is_symmetric:
        zeros = torch.full_like(scales, middle)
    elif scheme.block == (WHOLE, WHOLE):
        zeros = _per_row(scheme, n, k, read("weight_zero_point").float()) + middle
    else:
        zeros = unpack_words(read("weight_zero_point").t(), scheme.bits)[:, :n].t().float()
    order = column_order(scheme, k, read("weight_g_idx")) if "weight_g_idx" in found else None
    return _integer_rows(scheme, k, values, scales, zeros, order)


def _awq_columns(words: Tensor) -> Tensor:
    """int32 (rows, words) -> uint8 (rows, words * 8) in the order of the outputs."""
    values = unpack_words(words, 4).view(words.shape[0], -1, 8)
    back = [AWQ_ORDER.index(place) for place in range(8)]
    return values[..., back].flatten(1)


def _integer_rows(
    scheme: WeightScheme, k: int, values: Tensor, scales: Tensor, zeros: Tensor, order: Tensor | None
) -> QuantizedRows:
    """values uint8 (n, k) and zero points (n, groups) in the same range; int8 is made of 8-bit values."""
    middle = INT4_MIDDLE if scheme.bits == 4 else 128
    offsets: Tensor | None = (middle - zeros) * scales
    stores_middles = scheme.is_symmetric or scheme.layout == "gptq"
    if stores_middles and not bool((zeros != middle).any()):  # else a part might have none by chance, and others some
        offsets = None
    if scheme.bits == 8:
        values = (values ^ 128).view(torch.int8)  # the same as subtracting 128
    if order is not None:
        values = values[:, order]
    return _rows(scheme, k, values, scales, offsets, order)


def _rows(
    scheme: WeightScheme, k: int, values: Tensor, scales: Tensor, offsets: Tensor | None, order: Tensor | None
) -> QuantizedRows:
    if not bool(torch.isfinite(scales).all()):
        raise ConfigError("a scale is infinite or not a number")
    group_size = k if scales.shape[1] == 1 else scheme.block[1]
    scales = scales.contiguous()
    return QuantizedRows(values.contiguous(), scales, offsets, group_size, order, scheme.quantizes_inputs)


def column_order(scheme: WeightScheme, k: int, g_idx: Tensor) -> Tensor | None:
    """Columns sorted by group; None when they are already. Raises ConfigError for groups of other sizes."""
    columns = scheme.block[1] or k
    expected = torch.arange(k, device=g_idx.device) // columns
    if bool((g_idx == -1).all()) or torch.equal(g_idx.long(), expected):  # -1: a placeholder
        return None
    order = torch.argsort(g_idx, stable=True)
    if not torch.equal(g_idx[order].long(), expected):
        raise ConfigError(f"g_idx does not divide {k} inputs into groups of {columns}")
    return order


def _scale_shapes(scheme: WeightScheme, n: int, k: int) -> tuple[Shape, ...]:
    rows, groups = scheme.block[0], num_groups(scheme, k)
    if rows == WHOLE:
        return (), (1,), (1, 1)
    blocks = -(-n // rows)
    return ((blocks, groups), (blocks,)) if groups == 1 else ((blocks, groups),)


def _per_row(scheme: WeightScheme, n: int, k: int, values: Tensor) -> Tensor:
    """Values per tensor, row or block as (n, groups)."""
    rows, groups = scheme.block[0], num_groups(scheme, k)
    if rows == WHOLE:
        return values.reshape(1, 1).expand(n, 1)
    return values.reshape(-1, groups).repeat_interleave(rows, dim=0)[:n]


def _words(count: int, bits: int) -> int:
    """Words of 32 bits that hold `count` values."""
    return -(-count * bits // 32)
