"""Which model families exist. A family is a function pair: correct the config, build the model from weights.

Families register themselves when `engine.models` is imported; adding one means adding a file there.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from common.errors import UnsupportedModelError
from engine.layers.decoder import DecoderModel, OnLayer
from engine.layers.weights import WeightSource
from engine.models.config import ModelConfig

AdaptConfig = Callable[[ModelConfig, Mapping[str, Any]], ModelConfig]


class Build(Protocol):
    """Makes a model; `on_layer` sees each layer as soon as it is made."""

    def __call__(
        self, config: ModelConfig, weights: WeightSource, on_layer: OnLayer | None = None
    ) -> DecoderModel: ...


@dataclass(frozen=True, slots=True)
class ModelFamily:
    """How one architecture differs from the shared decoder.

    adapt_config: from the common translation and the raw metadata (Hugging Face or GGUF) to the final config.
    build: asks the weight source for every weight by its Hugging Face name.
    gguf_name: value of `general.architecture` in GGUF files; empty: none.
    gguf_permuted: GGUF files of this family hold q and k rows in llama.cpp's interleaved rotary order.
    """

    architecture: str
    adapt_config: AdaptConfig
    build: Build
    gguf_name: str = ""
    gguf_permuted: bool = False


_FAMILIES: dict[str, ModelFamily] = {}


def register(
    architecture: str, adapt_config: AdaptConfig, *, gguf_name: str = "", gguf_permuted: bool = False
) -> Callable[[Build], Build]:
    """Decorator of a build function."""

    def add(build: Build) -> Build:
        _FAMILIES[architecture] = ModelFamily(architecture, adapt_config, build, gguf_name, gguf_permuted)
        return build

    return add


def family_of(architecture: str) -> ModelFamily:
    """The family with this Hugging Face class name. Raises UnsupportedModelError that names the known ones."""
    family = _FAMILIES.get(architecture)
    if family is None:
        raise UnsupportedModelError(
            f"architecture {architecture!r} is not supported (known: {', '.join(sorted(_FAMILIES))})"
        )
    return family


def family_of_gguf(gguf_name: str) -> ModelFamily:
    """The family whose GGUF files carry `gguf_name`. Raises UnsupportedModelError."""
    for family in _FAMILIES.values():
        if family.gguf_name == gguf_name:
            return family
    known = sorted(family.gguf_name for family in _FAMILIES.values() if family.gguf_name)
    raise UnsupportedModelError(f"GGUF architecture {gguf_name!r} is not supported (known: {', '.join(known)})")
