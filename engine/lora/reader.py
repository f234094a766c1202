"""Reads an adapter from a PEFT folder, after checking its shapes against the model's.

    y = W x + scale * B A x        A: (rank, in), B: (out, rank)

Modules that are one layer here become one pair: their As are concatenated, their Bs are diagonal blocks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import inf
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.utils import get_total_norm

from common.errors import ConfigError
from common.lora.adapter_config import read_adapter_config
from common.lora.adapter_ref import WEIGHTS_NAME, AdapterRef
from engine.loader.safetensors import PLAIN_TYPES, StoredTensor, read_header
from engine.lora.layers import Layer, Layers, Module

PREFIX = "base_model.model."
A, B, EMBEDDING_A, EMBEDDING_B = ".lora_A.weight", ".lora_B.weight", ".lora_embedding_A", ".lora_embedding_B"
Copy = Callable[[Path, Iterable[StoredTensor]], Sequence[Tensor]]
PARTNERS = {A: B, B: A, EMBEDDING_A: EMBEDDING_B, EMBEDDING_B: EMBEDDING_A}


class LowRank(NamedTuple):
    """A pair that adds `b` times `a` times the input to a layer's output. a: (rank, in); b: (out, rank), scaled."""

    a: Tensor
    b: Tensor


class ModulePart(NamedTuple):
    """An adapter's part for one module of a layer, from the layer's row `first` on.

    number: the module's index in the layer. a: (rank, in) and b: (out, rank), as stored. scale: of their product.
    """

    number: int
    first: int
    a: Tensor
    b: Tensor
    scale: float


@dataclass(frozen=True, slots=True)
class AdapterWeights:
    """An adapter's weights. linears: for each of the model's linear layers, None if unchanged. embedding: a is (rank,
    vocab).
    """

    linears: tuple[LowRank | None, ...]
    embedding: LowRank | None


class AdapterFile:
    """An adapter whose names, shapes and config fit a model; `read` returns its weights, from any thread."""

    def __init__(self, ref: AdapterRef, layers: Layers, max_rank: int) -> None:
        """Raises ConfigError for files that changed, are damaged, do not fit the model or are not plain LoRA."""
        ref.check()
        self._config = read_adapter_config(ref.folder)
        if self._config.max_rank > max_rank:
            raise ConfigError(
                f"the adapter has rank {self._config.max_rank}, workers were started with --max-lora-rank {max_rank}"
            )
        self._path = ref.folder / WEIGHTS_NAME
        self._layers, self._all = layers, layers.whole or layers
        self._stored = {name.removeprefix(PREFIX): (name, found) for name, found in read_header(self._path).items()}
        self._check()

    @property
    def changes_head(self) -> bool:
        return any(module.name + A in self._stored for module in self._all.linears[-1].modules)

    def _check(self) -> None:
        if not self._stored:
            raise ConfigError(f"{WEIGHTS_NAME} holds no weights")
        known = self._all.names
        modules = {m.name: (layer, m) for layer in self._all.linears for m in layer.modules}
        for name, (_, found) in self._stored.items():
            suffix = next((each for each in PARTNERS if name.endswith(each)), None)
            if suffix is None:
                raise ConfigError(f"the adapter holds {name[:200]}, which is no weight of plain LoRA")
            module = name.removesuffix(suffix)
            is_embedding = module == self._all.embedding
            if module in self._all.left_out:
                raise ConfigError(f"the adapter changes {module}, which --lora-target-modules of workers has to name")
            if module not in known or is_embedding is not (suffix in (EMBEDDING_A, EMBEDDING_B)):
                raise ConfigError(f"the adapter changes {module[:200]}, which adapters of this model cannot")
            if module + PARTNERS[suffix] not in self._stored:
                raise ConfigError(f"the adapter has {name} without its partner {module + PARTNERS[suffix]}")
            rank = self._config.rank_of(module)
            if is_embedding:
                num_columns, num_rows = self._all.vocab_size, self._all.hidden_size
            else:
                layer, place = modules[module]
                num_columns, num_rows = layer.num_columns, place.num_outputs
            wanted = (rank, num_columns) if suffix in (A, EMBEDDING_A) else (num_rows, rank)
            self._check_tensor(name, found, wanted)

    @staticmethod
    def _check_tensor(name: str, found: StoredTensor, wanted: tuple[int, int]) -> None:
        if found.type_name not in PLAIN_TYPES:
            raise ConfigError(f"the adapter's {name} holds {found.type_name} numbers, which are not read")
        if found.shape != wanted:
            raise ConfigError(
                f"the adapter's {name} is {list(found.shape)}, this model and its rank need {list(wanted)}"
            )

    @torch.inference_mode()
    def read(self, dtype: torch.dtype) -> AdapterWeights:
        """Read all weights on the CPU. Raises ConfigError for an unreadable file."""
        tensors = self._tensors()
        pairs = [self._pair(layer, self._parts(layer, tensors), dtype) for layer in self._layers.linears]
        embedding = None
        for part in self._embedding_parts(tensors):
            embedding = LowRank(part.a.to(dtype), (part.b.float() * part.scale).to(dtype))
        return AdapterWeights(tuple(pairs), embedding)

    def read_parts(self, copy: Copy, dtype: torch.dtype) -> list[list[ModulePart]]:
        """Read the parts of each linear layer, separately for its modules; last those of the embedding, whose `a` is
        (rank, vocab).

        Raises ConfigError, also for weights that are infinite or undefined in `dtype`, on all ranks alike: kernels
        multiply them by zeros for rows without this adapter.
        """
        stored = [found for _, found in self._stored.values()]
        tensors = dict(zip(self._stored, copy(self._path, stored), strict=True))
        read = [*(self._parts(layer, tensors) for layer in self._layers.linears), self._embedding_parts(tensors)]
        largest = float(get_total_norm(tensors.values(), inf))
        scale = max((abs(part.scale) for parts in read for part in parts), default=0.0)
        if not largest * max(scale, 1.0) <= torch.finfo(dtype).max:
            raise ConfigError(f"{self._path} holds weights that are infinite or undefined")
        return read

    def _tensors(self) -> dict[str, Tensor]:
        from safetensors import SafetensorError, safe_open

        try:
            with safe_open(self._path, framework="pt") as file:
                return {name: file.get_tensor(stored) for name, (stored, _) in self._stored.items()}
        except (SafetensorError, OSError) as error:
            raise ConfigError(f"{self._path} is damaged or cannot be read") from error

    def _parts(self, layer: Layer, tensors: Mapping[str, Tensor]) -> list[ModulePart]:
        columns = slice(layer.columns.start, layer.columns.stop)
        return [
            ModulePart(
                number, module.first, tensors[module.name + A][:, columns],
                _rows_of(module, tensors[module.name + B]), self._config.scale_of(module.name),
            )
            for number, module in enumerate(layer.modules)
            if module.name + A in tensors
        ]  # fmt: skip

    def _pair(self, layer: Layer, parts: list[ModulePart], dtype: torch.dtype) -> LowRank | None:
        if not parts:
            return None
        a = torch.cat([part.a for part in parts]).to(dtype)
        b = torch.zeros(layer.num_rows, a.shape[0], dtype=dtype)
        column = 0
        for part in parts:
            rows, rank = part.b.shape
            b[part.first : part.first + rows, column : column + rank] = part.b.float() * part.scale
            column += rank
        return LowRank(a, b)

    def _embedding_parts(self, tensors: Mapping[str, Tensor]) -> list[ModulePart]:
        module, tokens = self._layers.embedding, self._layers.tokens
        if module + EMBEDDING_A not in tensors:
            return []
        own = tensors[module + EMBEDDING_A][:, tokens.start : tokens.stop]
        a = functional.pad(own, (0, len(tokens) - own.shape[1]))  # the last rank's vocabulary may end in padding
        return [ModulePart(0, 0, a, tensors[module + EMBEDDING_B], self._config.scale_of(module))]


def _rows_of(module: Module, whole: Tensor) -> Tensor:
    """Return the rows of a stored module that belong to this one, in the model's order.

    Fewer than its rows if these end in padding.
    """
    lies = module.lies
    if lies is not None:
        whole = whole[lies.first : lies.first + lies.num_rows]
        order = lies.order(lies.num_rows)
        whole = whole if order is None else whole[order]
    return whole[module.rows.start : module.rows.stop]
