"""Makes the libraries load their GEMMs before anything is served.

cuBLAS loads a kernel when it first chooses it, and what it chooses depends on the number of rows. A load waits for
all that the device has been given: 11 of 40 steps with new numbers of rows held the host while the one before ran.
"""

from __future__ import annotations

from collections.abc import Sequence

from engine.layers.linear import Linear
from engine.models.model import Model

ROW_STEP = 64  # of 40 multiples of it, one chose a kernel that 25 other numbers of rows had not


def sizes_to_warm(above: int, most: int) -> range:
    """Numbers of rows that stand for those in between."""
    return range(above + ROW_STEP, most + 1, ROW_STEP)


def warm_up_gemms(model: Model, sizes: Sequence[int], head_sizes: Sequence[int]) -> None:
    """Run cuBLAS's GEMM of each 16-bit weight's shape with these numbers of rows, on the current stream.

    head_sizes: for the output projection, which computes the rows that are sampled.
    """
    seen = set()
    for layer in (reference.layer.dense or reference.layer for reference in model.linears()):
        shape = layer.weight.shape, layer.weight.dtype, layer.bias is None
        if layer.is_16_bit and shape not in seen:
            seen.add(shape)
            _run(layer, head_sizes if layer is model.head else sizes)


def _run(layer: Linear, sizes: Sequence[int]) -> None:
    if sizes:
        x = layer.weight.new_zeros(max(sizes), layer.weight.shape[1])
        for size in sizes:
            layer(x[:size])
