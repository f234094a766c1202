"""Registry of model families. A family is two functions: one adapts the config, one yields the model's parts.

Families register themselves when `engine.models.families` is imported.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from common.errors import UnsupportedModelError
from engine.layers.weights import ShapeRecorder, WeightSource
from engine.models.config import ModelConfig
from engine.models.model import Model, OnBlock, Part, assemble_model

AdaptConfig = Callable[[ModelConfig, Mapping[str, Any]], ModelConfig]
TextConfig = Callable[[Mapping[str, Any]], dict[str, Any]]
Parts = Callable[[ModelConfig, WeightSource], Iterator[Part]]
Fused = Mapping[str, tuple[str, ...]]


@dataclass(frozen=True, slots=True)
class ModelFamily:
    """One architecture.

    adapt_config: makes the final config from the commonly translated one and the raw metadata (Hugging Face or
        GGUF).
    parts: yields the model from the embedding to the head, taking every weight by its Hugging Face name.
    text_config: returns the text model's part of a config.json that describes more.
    fused: names of tensors within a layer in which several weights are stacked, and of these weights.
    """

    architecture: str
    adapt_config: AdaptConfig
    parts: Parts
    text_config: TextConfig | None = None
    fused: Fused = field(default_factory=dict)

    def build(self, config: ModelConfig, weights: WeightSource, on_block: OnBlock | None = None) -> Model:
        return assemble_model(config, self.parts(config, weights), on_block)

    def skeleton(self, config: ModelConfig) -> tuple[Model, dict[str, tuple[int, ...]]]:
        """Return the model without storage, and the shapes of all weights that it takes, in that order."""
        recorder = ShapeRecorder()
        return self.build(config, recorder), recorder.shapes


FAMILIES: dict[str, ModelFamily] = {}
absent: list[str] = []  # modules of families that this installation lacks


def register(architecture: str, adapt_config: AdaptConfig, **others: Any) -> Callable[[Parts], Parts]:
    """Return a decorator for a function that yields a model's parts. others: further fields of its `ModelFamily`."""

    def add(parts: Parts) -> Parts:
        FAMILIES[architecture] = ModelFamily(architecture, adapt_config, parts, **others)
        return parts

    return add


def family_of(architecture: str) -> ModelFamily:
    """Return the family of a Hugging Face class name. Raises UnsupportedModelError, which names the known ones."""
    family = FAMILIES.get(architecture) or FAMILIES.get(f"{architecture.removesuffix('Model')}ForCausalLM")
    if family is None:
        raise UnsupportedModelError(f"architecture {architecture!r} is not supported (known: {listed(FAMILIES)})")
    return family


def listed(known: Iterable[str]) -> str:
    """List names for an error message."""
    return ", ".join(sorted(known)) + (f"; not installed: {', '.join(absent)}" if absent else "")
