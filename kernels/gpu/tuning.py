"""Tuning tables: rules that choose the settings of a kernel by the sizes of its launch.

Tables for few rows, experts, latents and quantized weights are in their folders. Only these files and this one name
chips and models. All was measured on an H200, in whole captured steps unless noted otherwise; on other chips the
settings work, untuned. A kernel file knows the meaning of its config; the engine looks it up. New rules come from
`benchmarks/kernels/bench_*.py --sweep`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Generic, TypeVar

Config = TypeVar("Config")
Bounds = tuple[float, float]  # (exclusive lower, inclusive upper)


def above(limit: float) -> Bounds:
    return limit, float("inf")


def at_most(limit: float) -> Bounds:
    return float("-inf"), limit


def between(low: float, high: float) -> Bounds:
    """Return the bounds above `low` and at most `high`."""
    return low, high


class Rule(Generic[Config]):
    """The choice of `config` if every named number is within its bounds."""

    def __init__(self, config: Config, **bounds: Bounds) -> None:
        self.config = config
        self.bounds = bounds


def first_fit(rules: Sequence[Rule[Config]], **numbers: float) -> Config | None:
    for rule in rules:
        if all(low < numbers[name] <= high for name, (low, high) in rule.bounds.items()):
            return rule.config
    return None


class Table(Generic[Config]):
    """Rules, tried in this order. `find` is called at every launch, so its results are cached."""

    def __init__(self, *rules: Rule[Config]) -> None:
        self.rules = rules
        self.find: Callable[..., Config | None] = lru_cache(maxsize=4096)(partial(first_fit, rules))


def found(config: Config | None) -> Config:
    """Return the config from a table that has a rule for all numbers."""
    assert config is not None, "there is a rule for any number"
    return config


@dataclass(frozen=True, slots=True)
class DecodeConfig:
    """tile: keys per step of a program's loop. num_stages: of its pipeline, including the step that computes.
    programs_per_sm: number of programs for each multiprocessor if there are too few rows and heads to fill it.
    lists_blocks: a program reads its block ids before the loop, and all stages hold keys and values; if not, half of
    the stages wait for ids, which takes half the shared memory, so that more programs fit.
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
    """tokens, heads: number of each that one program processes."""

    tokens: int
    heads: int
    num_warps: int


# `paged_decode`; programs: rows * KV heads, group: query heads of each, itemsize: bytes of a number in K and V.
# Heads wider than 128 are not measured yet: half the keys a step, so that as many programs fit a multiprocessor as
# with 128, and settings that do not spill registers (`python -m pytest tests/compile -k kv_groups`). The others are
# the fastest, or within 1% of it, at 1k and 32k of context (docs/decisions/attention-kernels.md), if the preceding
# rotation lets these programs start late, so that they spread. Step in us of Qwen3-0.6B at 8 | 32 | 64 rows, where
# they start early up to 16 rows: FEW_HEADS 941 | 1746 | 2861, LONG_TILES 1006 | 1939 | 2773, SHORT_TILES 999 | 2216 |
# 2710. Of Qwen2.5-7B at 8 | 32 | 64 | 128: 4118 | 4637 | 5278 | 6771, LONG_TILES 4089 | 4627 | 5197 | 6611,
# SHORT_TILES 4093 | 4862 | 5517 | 6586. More programs than two to a multiprocessor come in two rounds with FEW_HEADS:
# Qwen3-0.6B at 40 | 48 rows 2352 | 2452, LONG_TILES 1968 | 2198. By the kernel's own benchmark: 256 rows, Qwen2.5-7B
# and Qwen3-0.6B, MANY_PROGRAMS 128 and 247 us, SHORT_TILES 133 and 255. 8-bit K and V of Qwen2.5-7B, 1 x 32k | 8 x 1k
# | 64 x 1k | 256 x 1k: ONE_BYTE 16.0 | 8.7 | 25.5 | 76, ONE_BYTE_MANY_ROWS 21.1 | 10.7 | 30.5 | 71.
# Uneven rows need more programs than fit at once: 256 of Azure's trace, Qwen2.5-7B, 172 us with 4 programs of
# MANY_PROGRAMS a multiprocessor and 164 with 8; of 1k each 144 and 131. Steps in ms, SHORT_TILES -> WHOLE_ROWS:
# Qwen3-0.6B at 40 | 64 | 96 rows of 1k 2.00 -> 2.02 | 2.65 -> 2.59 | 3.83 -> 4.03, at 64 | 96 of Azure's trace 3.06
# -> 3.07 | 4.28 -> 4.44; Qwen2.5-7B at 96 | 128 | 200 of 1k 6.17 -> 6.12 | 6.59 -> 6.54 | 8.26 -> 8.48, at 78 | 128 |
# 200 of the trace 6.04 -> 6.07 | 6.92 -> 6.89 | 8.64 -> 8.73.
LONG_TILES = DecodeConfig(32, 2, 7, 2)
FEW_HEADS = DecodeConfig(64, 4, 4, 2, lists_blocks=True)  # two programs fill a multiprocessor, so they spread evenly
SHORT_TILES = DecodeConfig(16, 1, 6, 8)  # one warp needs no barriers; many programs fit on a multiprocessor
WHOLE_ROWS = DecodeConfig(16, 1, 6, 4)  # equal rows fill the GPU with one program each and are not split
MANY_PROGRAMS = DecodeConfig(32, 1, 4, 8)
FOUR_BYTES = DecodeConfig(32, 2, 4, 2)
ONE_BYTE = DecodeConfig(64, 4, 5, 4)
ONE_BYTE_MANY_ROWS = DecodeConfig(64, 1, 4, 8)
WIDE_HEADS = DecodeConfig(32, 4, 4, 2, lists_blocks=True)
WIDE_ONE_BYTE_MANY_ROWS = DecodeConfig(64, 2, 4, 8)
DECODE = Table(
    Rule(FOUR_BYTES, itemsize=above(2)),
    Rule(ONE_BYTE, itemsize=at_most(1), programs=at_most(511)),
    Rule(WIDE_ONE_BYTE_MANY_ROWS, itemsize=at_most(1), head_dim=above(128)),
    Rule(ONE_BYTE_MANY_ROWS, itemsize=at_most(1)),
    Rule(WIDE_HEADS, head_dim=above(128), programs=at_most(511)),
    Rule(SHORT_TILES, head_dim=above(128)),
    Rule(FEW_HEADS, group=at_most(4), programs=at_most(264)),
    Rule(LONG_TILES, programs=at_most(264)),
    Rule(WHOLE_ROWS, programs=between(384, 528)),
    Rule(SHORT_TILES, programs=at_most(1023)),
    Rule(MANY_PROGRAMS),
)
# Keys that a decode program prefetches while the previous kernel still runs, and the most rows with prefetch; more
# take bandwidth from that kernel. A step of Qwen3-0.6B at 4 | 8 | 32 rows without: 1021 | 1173 | 1913 us, with 32
# keys 986 | 1149 | 1895, with all of 1k 1000 | 1183 | 2043.
PREFETCHED_KEYS, MAX_PREFETCH_ROWS = 32, 32

# `paged_prefill`, by rows of a tile. TFLOP/s with pages of 64, Qwen2.5-7B at 2k | 8k | 2k over 16k, Qwen3-0.6B at
# 2k | 8k. Through a descriptor: tiles of 128 x 64, 4 warps, 2 stages 372 | 487 | 450, 264 | 497; 64 x 64, 4, 2 373
# | 454 | 381, 376 | 433; two blocks a step, 128 x 128, 8, 2 358 | 482 | 403, 364 | 454; 3 stages are slower.
# Through pointers: 128 x 128, 8, 2 320 | 435 | 370, 319 | 412; 64 x 64, 4, 3 334 | 407 | 338, 352 | 407.
# Heads wider than 128, not measured yet, need 8 warps to keep their sums in registers: at 128 rows a thread spills
# 2,256 bytes with 4 warps, 72 with 8.
PREFILL_BY_DESCRIPTOR = {128: PrefillConfig(64, 4, 2), 64: PrefillConfig(64, 4, 2)}
PREFILL_BY_POINTERS = {128: PrefillConfig(128, 8, 2), 64: PrefillConfig(64, 4, 3)}
PREFILL_WIDE_BY_DESCRIPTOR, PREFILL_WIDE_BY_POINTERS = PrefillConfig(64, 8, 2), PrefillConfig(32, 8, 2)

# `rope_and_write_kv`. Of 13 settings, 64 to 32,768 tokens, Qwen2.5-7B and Qwen3-0.6B: 4 x 4 with 4 warps is the
# fastest or within 4% of it everywhere (8,192 tokens: 42.2 and 40.0 us; 1 x 8 with 2 warps 51.4 and 44.7).
ROPE = Table(Rule(RopeConfig(1, 8, 4), tokens=at_most(31)), Rule(RopeConfig(4, 4, 4)))
