"""Experts that a model takes as one stacked weight, and a checkpoint stores as separate linear layers.

Tools that quantize linear layers first split gpt-oss's experts. For expert e they write, below `mlp.experts`,

    GPTQModel        gate_up.e, down.e
    Unsloth          gate_up_projs.e, down_projs.e; and router.linear for the router
    llm-compressor   e.gate_proj, e.up_proj, e.down_proj

each a weight (outputs, inputs) in the tool's format, and a bias. Rows of gate and up alternate in one layer, as the
columns of the stacked weight do. Kernels of such experts take stacked weights, so these are dequantized when read.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from engine.layers.weights import Part, PartSource
from engine.loader.checkpoint import Check, Shape
from engine.quantization.packed_checkpoint import PackedWeights

GATE_UP, DOWN, ROUTER, BIAS = ".experts.gate_up_proj", ".experts.down_proj", ".router.", "_bias"
LAYOUTS: tuple[tuple[tuple[str, ...], str], ...] = (  # the layers of gate and up, the layer of down
    (("gate_up.{}",), "down.{}"),
    (("gate_up_projs.{}",), "down_projs.{}"),
    (("{}.gate_proj", "{}.up_proj"), "{}.down_proj"),
    (("experts.{}.gate_proj", "experts.{}.up_proj"), "experts.{}.down_proj"),  # earlier releases of llm-compressor
)


@dataclass(frozen=True, slots=True)
class _Layers:
    """The layers of a stacked weight or bias, whose outputs alternate. names: with a placeholder for the expert."""

    names: tuple[str, ...]
    kind: str

    def shapes(self, shape: Shape) -> dict[str, Shape]:
        """Return the layers' shapes by the names of their weights or biases. shape: of the stacked one."""
        outputs = shape[-1] // len(self.names)
        single = (outputs, shape[1]) if self.kind == "weight" else (outputs,)
        return {self.name(name, expert): single for expert in range(shape[0]) for name in self.names}

    def name(self, layer: str, expert: int) -> str:
        return f"{layer.format(expert)}.{self.kind}"


class UnstackedExperts(PartSource):
    """Stacks split experts; all other weights are those of the source."""

    def __init__(self, source: PartSource, check: Check, needed: Iterable[str], found: Iterable[str]) -> None:
        """check: the source's, see `check_weights`. needed: the model's weights. found: names in the files."""
        self._source, self._check = source, check
        modules = {name.rpartition(".")[0] for name in found}
        self._stacked: dict[str, _Layers] = {}
        self._renamed: dict[str, str] = {}
        for name in needed:
            if (layers := _layers_of(name, modules)) is not None:
                self._stacked[name] = layers
            module, _, kind = name.rpartition(".")
            if ROUTER in name and f"{module}.linear" in modules:
                self._renamed[name] = f"{module}.linear.{kind}"

    @property
    def is_needed(self) -> bool:
        """Whether any weight is stored other than as the model takes it."""
        return bool(self._stacked or self._renamed)

    def check(self, needed: Mapping[str, Shape], tied: bool, unused: tuple[str, ...] = ()) -> None:
        """See `check_weights`."""
        stored: dict[str, Shape] = {}
        for name, shape in needed.items():
            layers = self._stacked.get(name)
            stored |= {self._renamed.get(name, name): shape} if layers is None else layers.shapes(shape)
        self._check(stored, tied=tied, unused=unused)
        if isinstance(self._source, PackedWeights):
            self._source.check_idle_biases()

    def take_part(self, name: str, part: Part) -> Tensor:
        """See PartSource."""
        layers = self._stacked.get(name)
        if layers is None:
            return self._source.take_part(self._renamed.get(name, name), part)
        experts, outputs = part[0], part[-1]
        count = len(layers.names)
        rows = range(outputs.start // count, -(-outputs.stop // count))
        first = outputs.start - rows.start * count
        taken = []
        for expert in experts:
            names = [layers.name(layer, expert) for layer in layers.names]
            pieces = [self._source.take_part(each, (rows, *part[1:-1])) for each in names]
            whole = torch.stack(pieces, 1).flatten(0, 1)[first : first + len(outputs)]
            taken.append(whole.t() if whole.dim() == 2 else whole)
        return torch.stack(taken)


def _layers_of(name: str, modules: set[str]) -> _Layers | None:
    """Return the layers of a stacked weight or bias; None for other weights, and for those stored as one."""
    weight = name.removesuffix(BIAS)
    if not weight.endswith((GATE_UP, DOWN)):
        return None
    experts = weight.rpartition(".")[0]
    for gate_up, down in LAYOUTS:
        names = tuple(f"{experts}.{layer}" for layer in (gate_up if weight.endswith(GATE_UP) else (down,)))
        if names[0].format(0) in modules:
            return _Layers(names, "weight" if weight == name else "bias")
    return None
