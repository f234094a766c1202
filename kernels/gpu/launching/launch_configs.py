"""What kernels are launched with, and tables of rules that choose it by the shape of the launch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Generic, TypeVar

Config = TypeVar("Config")
Bounds = tuple[float, float]  # above the first, at most the second


def above(limit: float) -> Bounds:
    return limit, float("inf")


def at_most(limit: float) -> Bounds:
    return float("-inf"), limit


def between(low: float, high: float) -> Bounds:
    """Above `low`, at most `high`."""
    return low, high


class Rule(Generic[Config]):
    """Gives `config` where every named number lies in its bounds."""

    def __init__(self, config: Config, **bounds: Bounds) -> None:
        self.config = config
        self.bounds = bounds


def first_fit(rules: Sequence[Rule[Config]], **numbers: float) -> Config | None:
    for rule in rules:
        if all(low < numbers[name] <= high for name, (low, high) in rule.bounds.items()):
            return rule.config
    return None


class Table(Generic[Config]):
    """Rules in the order in which they are tried. Asked at every launch, so answers are kept."""

    def __init__(self, *rules: Rule[Config]) -> None:
        self.rules = rules
        self.find: Callable[..., Config | None] = lru_cache(maxsize=4096)(partial(first_fit, rules))


def found(config: Config | None) -> Config:
    """What a table gives whose last rule has no bounds."""
    assert config is not None, "there is a rule for any number"
    return config


@dataclass(frozen=True, slots=True)
class DecodeConfig:
    """tile: keys per step of a program's loop. num_stages: of its pipeline, the step that computes among them.
    programs_per_sm: how many programs a multiprocessor gets when rows and heads alone are too few.
    lists_blocks: the ids of a program's blocks are read before its loop and all stages hold keys and values; else
    half of the stages wait for ids, which takes half the shared memory, so that more programs fit.
    """

    tile: int
    num_warps: int
    num_stages: int
    programs_per_sm: int
    lists_blocks: bool = False


@dataclass(frozen=True, slots=True)
class PrefillConfig:
    """tile_n: keys per step of a program's loop."""

    tile_n: int
    num_warps: int
    num_stages: int


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """tokens, heads: what one program takes."""

    tokens: int
    heads: int
    num_warps: int
