"""Linear layers over blocks in the layout of GGUF files, on CPUs with code in `kernels/gguf`.

    generated tokens   block weights, x quantized to int16
    prompts            weights dequantized (to bfloat16, with AVX2 to float32), a few rows at a time
    logits             as for generated tokens, from and to float32

Both GEMMs are batch invariant. Weights of a GGUF file stay in the mapped file: all workers of a host share them, and
loading does not read them. A checkpoint's MXFP4 experts are copied into such blocks.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from engine.cpu_gemms.gemms import give_float32_logits
from engine.gguf.mxfp4 import CheckpointBlocks
from engine.gguf.weights import GgufWeights
from engine.layers.block import Block, LinearRef
from engine.layers.linear import Linear
from engine.layers.weights import Part
from engine.loader.conversion import Conversion
from engine.models.model import Model
from engine.moe.moe import Moe
from engine.quantization.cpu_linears import CpuLinears
from kernels.gguf.experts import BlockExperts
from kernels.gguf.linear import BlockWeight, max_integer_rows


class BlockGemm:
    """A GEMM of `Linear`, see `BlockWeight.linear`. y has the dtype of x."""

    def __init__(self, weight: BlockWeight, in_integers: bool) -> None:
        self.weight, self.in_integers = weight, in_integers

    def __call__(self, linear: Linear, x: Tensor) -> Tensor:
        return self.weight.linear(x, linear.bias, x.dtype, self.in_integers)

    @staticmethod
    def together(experts: Mapping[int, tuple[Linear, Linear]], alpha: float, limit: float) -> BlockExperts | None:
        """Return a function of all experts at once for few tokens; None unless all of them compute in integers.

        alpha, limit: see `silu_mul`.
        """
        layers = [layer for pair in experts.values() for layer in pair]
        max_rows = {layer.max_rows if layer.dense is not None else 0 for layer in layers}
        if len(max_rows) > 1 or not all(map(_is_in_integers, layers)):
            return None
        weights = {index: (_block_layer(gate_up), _block_layer(down)) for index, (gate_up, down) in experts.items()}
        return BlockExperts(weights, max_rows.pop(), alpha, limit)


def _is_in_integers(layer: Linear) -> bool:
    gemm = layer.gemm
    return isinstance(gemm, BlockGemm) and gemm.in_integers and layer.order is None


def _block_layer(layer: Linear) -> tuple[BlockWeight, Tensor | None]:
    assert isinstance(layer.gemm, BlockGemm), "`_is_in_integers` was asked"
    return layer.gemm.weight, layer.bias


def block_linear(weight: BlockWeight, bias: Tensor | None, max_rows: int) -> Linear:
    """Return the layer of a packed weight. max_rows: of x for integer GEMMs, if the type has any; 0: all."""

    def form(in_integers: bool) -> Linear:
        gemm = BlockGemm(weight, in_integers)
        return Linear(weight.parts[0].rows, bias, gemm=gemm, num_columns=weight.num_columns)

    linear = form(weight.has_integers)
    if weight.has_integers and max_rows:
        linear.dense, linear.max_rows = form(in_integers=False), max_rows
    return linear


class PackedConversion(Conversion):
    """See Conversion. Layers that are not in blocks, or that ranks cut within a block, become int8."""

    def __init__(self, weights: GgufWeights | CheckpointBlocks, dtype: torch.dtype) -> None:
        super().__init__(weights.label)
        self._weights, self._others = weights, CpuLinears(dtype)
        self._names: frozenset[str] = frozenset()
        self._stacked: frozenset[str] = frozenset()  # stacked weights that experts are cut out of
        self._parts: Mapping[str, Part] = {}
        self._on_read: Callable[[str], None] = lambda _name: None

    @property
    def leaves_attention_plain(self) -> bool:
        return False

    def keep(self, skeleton: Model) -> frozenset[str]:
        """See Conversion. A tied embedding gets its storage, too."""
        layers = [ref.layer for ref in skeleton.linears()]
        packed = (layer.names for layer in layers if layer.names and all(map(self._weights.has_blocks, layer.names)))
        self._stacked = frozenset(
            layer.names[0]
            for layer in layers
            if layer.names and self._weights.has_expert_blocks(layer.names[0], layer.weight.shape[1])
        )
        self._names = frozenset(name for names in packed for name in names) | self._stacked
        is_tied = skeleton.head.weight is skeleton.embedding
        return self._names.difference(skeleton.head.names) if is_tied else self._names

    def start(self, parts: Mapping[str, Part], on_read: Callable[[str], None]) -> None:
        self._parts, self._on_read = parts, on_read

    def convert(self, block: Block) -> None:
        if isinstance(block, Moe):
            self._convert_stacked(block)
        for ref in block.linears():
            if not isinstance(ref.layer.gemm, BlockGemm):
                self._convert(ref, max_integer_rows())

    def finish(self, model: Model) -> None:
        ref = LinearRef(model, "head")
        if self._is_kept(ref.layer):
            self._convert(ref, max_rows=0)
            model.hidden_dtype = torch.float32
        elif not give_float32_logits(model):
            self._convert(ref, max_integer_rows())

    def _convert_stacked(self, block: Moe) -> None:
        """Make the layers of experts that are cut out of stacked weights, in blocks or plain."""
        read = set()
        for slot, expert in block.experts.items():
            for attribute in ("gate_up", "down"):
                layer: Linear = getattr(expert, attribute)
                if not layer.names or not self._stacked.issuperset(layer.names):
                    continue
                (name,) = layer.names
                _, columns, rows = self._parts.get(name) or map(range, self._weights.shapes[name])
                number, num_columns = block.rule.expert_of(slot), layer.weight.shape[1]
                if self._weights.has_expert_blocks(name, num_columns):
                    blocks = self._weights.expert_blocks(name, number, columns, rows)
                    made = block_linear(BlockWeight(blocks, num_columns), layer.bias, max_integer_rows())
                else:  # down, whose columns ranks cut within blocks; `convert` makes it int8
                    weight = self._weights.take_part(name, (range(number, number + 1), columns, rows))[0].T
                    made = Linear(weight.contiguous(), layer.bias)
                setattr(expert, attribute, made)
                read.add(name)
        for name in sorted(read):
            self._on_read(name)

    def _is_kept(self, linear: Linear) -> bool:
        return bool(linear.names) and self._names.issuperset(linear.names)

    def _convert(self, ref: LinearRef, max_rows: int) -> None:
        linear = ref.layer
        if not self._is_kept(linear):
            ref.replace(self._others.of_plain(linear))
            return
        blocks = [self._weights.blocks(name, self._parts.get(name)) for name in linear.names]
        whole = [each for each in blocks if each is not None]
        if len(whole) == len(blocks):
            ref.replace(block_linear(BlockWeight(whole, linear.weight.shape[1]), linear.bias, max_rows))
        else:
            ref.replace(self._others.of_plain(Linear(self._read(linear), linear.bias)))
        for name in linear.names:
            self._on_read(name)

    def _read(self, linear: Linear) -> Tensor:
        """Read the rank's part of a layer that is cut within blocks."""
        shapes = {name: tuple(map(range, self._weights.shapes[name])) for name in linear.names}
        return torch.cat([self._weights.take_part(name, self._parts.get(name, shapes[name])) for name in shapes])
