"""Workloads: random prompts or a recorded trace, as a list of `PlannedRequest`. Pure and seeded.

A prompt consists of units: words, each about one token in common vocabularies, or token ids if the size of the
vocabulary is given. Equal blocks of a trace become equal units at the same positions, so that prefixes shared in the
recording are shared again.
"""

from __future__ import annotations

import csv
import itertools
import json
import math
import random
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path

from common.errors import ConfigError

TRACE_BLOCK_TOKENS = 512  # tokens per hash id in a Mooncake trace
FIRST_TOKEN_ID = 3  # lower ids are special tokens in most vocabularies

# Frequent English words; each is one token, with the space before it, in common vocabularies.
_FREQUENT = (
    "the of and to in is you that it he was for on are as with his they at be this have from or one had by word "
    "but not what all were we when your can said there use an each which she do how their if will up other about "
    "out many then them these so some her would make like him into time has look two more write go see number no "
    "way could people my than first water been call who oil its now find long down day did get come made may part"
)
WORDS = tuple(_FREQUENT.split(" "))

Prompt = str | list[int]


@dataclass(frozen=True, slots=True)
class PlannedRequest:
    """One request: time (seconds after the start; ignored by closed loops), prompt, and number of output tokens."""

    at_seconds: float
    prompt: Prompt
    num_output_tokens: int


@dataclass(frozen=True, slots=True)
class TraceRow:
    """One recorded request. block_ids: equal ids at equal positions mean equal tokens; empty: unknown."""

    at_seconds: float
    num_input_tokens: int
    num_output_tokens: int
    block_ids: tuple[int, ...] = ()


class PromptMaker:
    """Makes prompts of a given length. vocab_size 0: text; otherwise lists of token ids below it."""

    def __init__(self, vocab_size: int = 0) -> None:
        if vocab_size and vocab_size <= FIRST_TOKEN_ID:
            raise ConfigError(f"--vocab-size {vocab_size}: too small to draw token ids from")
        self._vocab_size = vocab_size

    def fresh(self, rng: random.Random, length: int) -> Prompt:
        """Return a prompt that shares no prefix with others, except by chance."""
        return self._join(self._units(rng, length))

    def from_blocks(self, row: TraceRow, row_number: int, block_tokens: int, seed: int) -> Prompt:
        """Return the prompt of a trace row: each block from its id, the rest from random units of the row."""
        units: list[int] = []
        for block_id in row.block_ids:
            units += self._units(random.Random(f"{seed}/block/{block_id}"), block_tokens)
        missing = row.num_input_tokens - len(units)
        if missing > 0:
            units += self._units(random.Random(f"{seed}/row/{row_number}"), missing)
        return self._join(units[: row.num_input_tokens])

    def _units(self, rng: random.Random, length: int) -> list[int]:
        if self._vocab_size:
            return rng.choices(range(FIRST_TOKEN_ID, self._vocab_size), k=length)
        return rng.choices(range(len(WORDS)), k=length)

    def _join(self, units: list[int]) -> Prompt:
        return units if self._vocab_size else " ".join(WORDS[unit] for unit in units)


def parse_range(text: str, flag: str) -> tuple[int, int]:
    """Parse `"128"` or `"100-1024"`, both ends included. Raises ConfigError."""
    low, dash, high = text.partition("-")
    try:
        bounds = int(low), int(high if dash else low)
    except ValueError:
        raise ConfigError(f"{flag} {text!r}: give a number, or a range such as 100-1024") from None
    if not 1 <= bounds[0] <= bounds[1]:
        raise ConfigError(f"{flag} {text!r}: give at least 1, the smaller number first")
    return bounds


def random_workload(
    maker: PromptMaker,
    num_requests: int,
    input_range: tuple[int, int],
    output_range: tuple[int, int],
    request_rate: float,
    seed: int,
) -> list[PlannedRequest]:
    """Return independent requests: `request_rate` per second with exponential gaps (Poisson), 0: all at once."""
    rng = random.Random(seed)
    at_seconds = 0.0
    planned = []
    for _ in range(num_requests):
        prompt = maker.fresh(rng, rng.randint(*input_range))
        planned.append(PlannedRequest(at_seconds, prompt, rng.randint(*output_range)))
        if request_rate > 0:
            at_seconds += rng.expovariate(request_rate)
    return planned


def trace_workload(
    maker: PromptMaker, rows: Sequence[TraceRow], rate_scale: float, length_scale: float, seed: int
) -> Iterator[PlannedRequest]:
    """Replay a trace `rate_scale` times as fast, with all lengths, also of blocks, multiplied by `length_scale`.

    Prompts are made when they are due: those of a whole trace would fill the memory.
    """
    block_tokens = max(1, round(TRACE_BLOCK_TOKENS * length_scale))
    for number, row in enumerate(rows):
        scaled = TraceRow(
            row.at_seconds / rate_scale,
            max(1, round(row.num_input_tokens * length_scale)),
            max(1, round(row.num_output_tokens * length_scale)),
            row.block_ids,
        )
        prompt = maker.from_blocks(scaled, number, block_tokens, seed)
        yield PlannedRequest(scaled.at_seconds, prompt, scaled.num_output_tokens)


def read_trace(path: Path, max_requests: int = 0, duration_seconds: float = 0.0) -> list[TraceRow]:
    """Read a Mooncake JSONL or an Azure CSV trace from its first row on. 0: no limit. Raises ConfigError.

    Mooncake's clock ticks every three seconds: rows of one tick are spread evenly until the next.
    """
    reader = _read_azure if path.suffix == ".csv" else _read_mooncake
    rows: list[TraceRow] = []
    limit = duration_seconds or math.inf
    try:
        for row in _spread(reader(path)):
            if row.at_seconds >= limit or (max_requests and len(rows) >= max_requests):
                break
            rows.append(row)
    except OSError as error:
        raise ConfigError(f"--trace {path}: {error.strerror}") from error
    except (ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"--trace {path}, row {len(rows) + 1}: not a row of a Mooncake or Azure trace") from error
    if not rows:
        raise ConfigError(f"--trace {path}: no rows")
    return rows


def _spread(rows: Iterable[TraceRow]) -> Iterator[TraceRow]:
    """Spread rows with equal times evenly over the interval to the next time."""
    groups = (list(group) for _, group in itertools.groupby(rows, key=lambda row: row.at_seconds))
    last = next(groups, [])
    interval = 0.0
    for group in groups:
        interval = group[0].at_seconds - last[0].at_seconds
        yield from _spread_over(last, interval)
        last = group
    yield from _spread_over(last, interval)


def _spread_over(rows: Sequence[TraceRow], seconds: float) -> list[TraceRow]:
    return [replace(row, at_seconds=row.at_seconds + seconds * i / len(rows)) for i, row in enumerate(rows)]


def _read_mooncake(path: Path) -> Iterator[TraceRow]:
    with path.open(encoding="utf-8") as lines:
        for line in lines:
            row = json.loads(line)
            yield TraceRow(
                row["timestamp"] / 1e3, int(row["input_length"]), int(row["output_length"]), tuple(row["hash_ids"])
            )


def _read_azure(path: Path) -> Iterator[TraceRow]:
    begin: datetime | None = None
    with path.open(encoding="utf-8", newline="") as lines:
        for row in csv.DictReader(lines):
            # The file has seven decimals, Python supports six.
            moment = datetime.fromisoformat(row["TIMESTAMP"][:26])
            begin = begin or moment
            yield TraceRow((moment - begin).total_seconds(), int(row["ContextTokens"]), int(row["GeneratedTokens"]))
