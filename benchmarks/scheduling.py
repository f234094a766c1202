"""Gains of the scheduler, each figure beside its comparison in the same run of the same engine.

    python -m benchmarks.scheduling [--model M] [--trace FILE]

continuous: useful tokens per second against static batches of the same size, with the lengths of a trace.
    A static batch pads its prompts to the longest and computes all rows until the longest output has ended, which is
    what padded generation does.
prefix: time to first token of a prompt with a cached 1k prefix against the same engine without a cache.
chunked: longest gap between two tokens of a stream while a 2k prompt is computed, in chunks against whole.
slots: KV slots that hold a token over KV slots allocated, sampled at every step of the continuous run.
"""

from __future__ import annotations

import argparse
import csv
import random
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from benchmarks import harness
from common.model_files import DEFAULT_MODEL_NAME
from engine.assembly import assemble
from engine.config import EngineConfig
from engine.engine import Engine

BATCH = 16
NUM_REQUESTS = 64
REPEATS = 3


def make_engine(model: str, **settings: Any) -> Engine:
    return assemble(EngineConfig(model=model, **settings)).engine


def trace_lengths(path: Path | None, rng: random.Random) -> list[tuple[int, int]]:
    """Return (input, output) lengths: a random window of an Azure trace, scaled down, or a log-normal mix."""
    if path is None:
        pairs = [(rng.lognormvariate(4.5, 0.8), rng.lognormvariate(3.6, 1.0)) for _ in range(NUM_REQUESTS)]
        return [(min(max(int(i), 8), 512), min(max(int(o), 4), 400)) for i, o in pairs]
    with path.open() as file:
        rows = list(csv.DictReader(file))
    first = rng.randrange(len(rows) - NUM_REQUESTS)
    window = rows[first : first + NUM_REQUESTS]
    return [(max(int(r["ContextTokens"]) // 8, 8), max(int(r["GeneratedTokens"]) // 4, 4)) for r in window]


def bench_continuous(
    model: str, lengths: Sequence[tuple[int, int]], rng: random.Random, clock: harness.Clock
) -> list[dict[str, Any]]:
    engine = make_engine(model, max_num_seqs=BATCH, prefix_cache=False)
    prompts = [harness.random_prompt(rng, engine.vocab_size, num_input) for num_input, _ in lengths]
    num_useful = sum(num_output for _, num_output in lengths)
    used_slots = allocated_slots = 0

    def sample_slots() -> None:
        nonlocal used_slots, allocated_slots
        for request in requests:
            if request.block_ids:  # otherwise it waits or has ended
                used_slots += request.num_computed_tokens
                allocated_slots += len(request.block_ids) * engine.kv.block_size

    began = clock()
    requests = [
        engine.add_request(prompt, harness.greedy(num_output))
        for prompt, (_, num_output) in zip(prompts, lengths, strict=True)
    ]
    harness.drain(engine, sample_slots)
    continuous = clock() - began

    began = clock()
    for first in range(0, len(prompts), BATCH):
        num_input, num_output = map(max, zip(*lengths[first : first + BATCH], strict=True))
        for prompt in prompts[first : first + BATCH]:
            padding = harness.random_prompt(rng, engine.vocab_size, num_input - len(prompt))
            engine.add_request(padding + prompt, harness.greedy(num_output))
        harness.drain(engine)
    static = clock() - began
    return [
        {
            "figure": "continuous",
            "batch": BATCH,
            "requests": len(prompts),
            "useful_tokens": num_useful,
            "continuous_tok_s": round(num_useful / continuous, 1),
            "static_tok_s": round(num_useful / static, 1),
            "ratio": round(static / continuous, 2),
        },
        {"figure": "slots", "used_over_allocated": round(used_slots / allocated_slots, 4)},
    ]


def first_token_seconds(engine: Engine, prompt: list[int], clock: harness.Clock) -> float:
    began = clock()
    engine.add_request(prompt, harness.greedy(1))
    harness.drain(engine)
    return clock() - began


def bench_prefix(model: str, rng: random.Random, clock: harness.Clock) -> dict[str, Any]:
    cached, plain = make_engine(model), make_engine(model, prefix_cache=False)
    prefix = harness.random_prompt(rng, cached.vocab_size, 1024)
    first_token_seconds(cached, prefix, clock)

    def once() -> tuple[float, float]:
        prompt = prefix + harness.random_prompt(rng, cached.vocab_size, 32)
        return first_token_seconds(cached, prompt, clock), first_token_seconds(plain, prompt, clock)

    return {"figure": "prefix", **medians(once, 2 * REPEATS, ("hit_ms", "miss_ms"))}


def medians(once: Callable[[], tuple[float, float]], repeats: int, names: tuple[str, str]) -> dict[str, float]:
    """Return median milliseconds of two alternating measurements, and by how much the first is lower."""
    first, second = (statistics.median(seconds) for seconds in zip(*(once() for _ in range(repeats)), strict=True))
    milliseconds = {name: round(seconds * 1e3, 1) for name, seconds in zip(names, (first, second), strict=True)}
    return {**milliseconds, "lower_by": round(1 - first / second, 3)}


def longest_gap(engine: Engine, prompt: list[int], stream: list[int], clock: harness.Clock) -> float:
    """Return the longest gap between tokens of a running stream, from the arrival of `prompt` to its first token."""
    request = engine.add_request(stream, harness.greedy(4096))
    harness.prefill(engine, [request], 8)
    long = engine.add_request(prompt, harness.greedy(2))
    gaps, last = [], clock()
    while not long.output_token_ids:
        engine.step()
        now = clock()
        gaps.append(now - last)
        last = now
    engine.abort(request.request_id)
    engine.abort(long.request_id)
    return max(gaps)


def bench_chunked(model: str, rng: random.Random, clock: harness.Clock) -> dict[str, Any]:
    chunked = make_engine(model, prefix_cache=False)
    whole = make_engine(model, prefix_cache=False, max_num_batched_tokens=4096)

    def once() -> tuple[float, float]:
        prompt, stream = (harness.random_prompt(rng, chunked.vocab_size, length) for length in (2048, 64))
        return longest_gap(chunked, prompt, stream, clock), longest_gap(whole, prompt, stream, clock)

    return {"figure": "chunked", **medians(once, REPEATS, ("chunked_ms", "whole_ms"))}


def main() -> None:
    parser = argparse.ArgumentParser(prog="benchmarks.scheduling", description="Scheduling against its absence.")
    parser.add_argument("--model", default="", help="as for mini-infer serve")
    parser.add_argument("--trace", type=Path, help="an Azure trace (CSV); without: a log-normal mix of lengths")
    parser.add_argument("--seed", type=int, default=random.randrange(1 << 30))
    parser.add_argument("--only", choices=("continuous", "prefix", "chunked"))
    harness.add_cpu_time_argument(parser)
    options = parser.parse_args()
    clock = harness.choose_clock(options)
    rng = random.Random(options.seed)
    rows: list[dict[str, Any]] = []
    if options.only in (None, "continuous"):
        rows += bench_continuous(options.model, trace_lengths(options.trace, rng), rng, clock)
    if options.only in (None, "prefix"):
        rows.append(bench_prefix(options.model, rng, clock))
    if options.only in (None, "chunked"):
        rows.append(bench_chunked(options.model, rng, clock))
    for row in rows:
        harness.report({"model": options.model or DEFAULT_MODEL_NAME, "seed": options.seed, **row})


if __name__ == "__main__":
    main()
