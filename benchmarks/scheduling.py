"""What the scheduler is worth, each figure beside its comparison in the same run of the same engine.

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
import json
import random
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from engine.assembly import assemble
from engine.config import EngineConfig
from engine.engine import Engine
from engine.request import Request, SamplingParams

Clock = Callable[[], float]
BATCH = 16
NUM_REQUESTS = 64
REPEATS = 3


def greedy(max_tokens: int) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True)


def make_engine(model: str, **settings: Any) -> Engine:
    return assemble(EngineConfig(model=model, **settings)).engine


def random_prompt(rng: random.Random, vocab_size: int, num_tokens: int) -> list[int]:
    return [rng.randrange(vocab_size // 2) for _ in range(num_tokens)]


def trace_lengths(path: Path | None, rng: random.Random) -> list[tuple[int, int]]:
    """(input, output) lengths: a random window of an Azure trace cut to a laptop's size, or a log-normal mix."""
    if path is None:
        pairs = [(rng.lognormvariate(4.5, 0.8), rng.lognormvariate(3.6, 1.0)) for _ in range(NUM_REQUESTS)]
        return [(min(max(int(i), 8), 512), min(max(int(o), 4), 400)) for i, o in pairs]
    with path.open() as file:
        rows = list(csv.DictReader(file))
    first = rng.randrange(len(rows) - NUM_REQUESTS)
    window = rows[first : first + NUM_REQUESTS]
    return [(max(int(r["ContextTokens"]) // 8, 8), max(int(r["GeneratedTokens"]) // 4, 4)) for r in window]


def drain(engine: Engine, on_step: Any = None) -> None:
    while engine.has_work():
        engine.step()
        if on_step is not None:
            on_step()


def bench_continuous(
    model: str, lengths: Sequence[tuple[int, int]], rng: random.Random, clock: Clock
) -> list[dict[str, Any]]:
    engine = make_engine(model, max_num_seqs=BATCH, prefix_cache=False)
    prompts = [random_prompt(rng, engine.vocab_size, num_input) for num_input, _ in lengths]
    num_useful = sum(num_output for _, num_output in lengths)
    used_slots = allocated_slots = 0

    def sample_slots() -> None:
        nonlocal used_slots, allocated_slots
        for request in engine.scheduler.requests():
            used_slots += request.num_computed_tokens
            allocated_slots += len(request.block_ids) * engine.scheduler.kv.block_size

    began = clock()
    for prompt, (_, num_output) in zip(prompts, lengths, strict=True):
        engine.add_request(prompt, greedy(num_output))
    drain(engine, sample_slots)
    continuous = clock() - began

    began = clock()
    for first in range(0, len(prompts), BATCH):
        num_input, num_output = map(max, zip(*lengths[first : first + BATCH], strict=True))
        for prompt in prompts[first : first + BATCH]:
            padding = random_prompt(rng, engine.vocab_size, num_input - len(prompt))
            engine.add_request(padding + prompt, greedy(num_output))
        drain(engine)
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


def first_token_seconds(engine: Engine, prompt: list[int], clock: Clock) -> float:
    began = clock()
    engine.add_request(prompt, greedy(1))
    drain(engine)
    return clock() - began


def bench_prefix(model: str, rng: random.Random, clock: Clock) -> dict[str, Any]:
    cached, plain = make_engine(model), make_engine(model, prefix_cache=False)
    prefix = random_prompt(rng, cached.vocab_size, 1024)
    first_token_seconds(cached, prefix, clock)
    with_cache, without = [], []
    for _ in range(2 * REPEATS):
        prompt = prefix + random_prompt(rng, cached.vocab_size, 32)
        with_cache.append(first_token_seconds(cached, prompt, clock))
        without.append(first_token_seconds(plain, prompt, clock))
    hit, miss = statistics.median(with_cache), statistics.median(without)
    return {
        "figure": "prefix",
        "hit_ms": round(hit * 1e3, 1),
        "miss_ms": round(miss * 1e3, 1),
        "lower_by": round(1 - hit / miss, 3),
    }


def longest_gap(engine: Engine, prompt: list[int], stream: list[int], clock: Clock) -> float:
    """Longest time between two tokens of a running stream, from the arrival of `prompt` to its first token."""
    request: Request = engine.add_request(stream, greedy(4096))
    while len(request.output_token_ids) < 8:
        engine.step()
    long = engine.add_request(prompt, greedy(2))
    gaps, last = [], clock()
    while not long.output_token_ids:
        engine.step()
        now = clock()
        gaps.append(now - last)
        last = now
    engine.abort(request.request_id)
    engine.abort(long.request_id)
    return max(gaps)


def bench_chunked(model: str, rng: random.Random, clock: Clock) -> dict[str, Any]:
    chunked = make_engine(model, prefix_cache=False)
    whole = make_engine(model, prefix_cache=False, max_num_batched_tokens=4096)
    in_chunks, at_once = [], []
    for _ in range(REPEATS):
        prompt = random_prompt(rng, chunked.vocab_size, 2048)
        stream = random_prompt(rng, chunked.vocab_size, 64)
        in_chunks.append(longest_gap(chunked, prompt, stream, clock))
        at_once.append(longest_gap(whole, prompt, stream, clock))
    small, large = statistics.median(in_chunks), statistics.median(at_once)
    return {
        "figure": "chunked",
        "chunked_ms": round(small * 1e3, 1),
        "whole_ms": round(large * 1e3, 1),
        "lower_by": round(1 - small / large, 3),
    }


def main() -> None:
    parser = argparse.ArgumentParser(prog="benchmarks.scheduling", description="Scheduling against its absence.")
    parser.add_argument("--model", default="", help="as for mini-infer serve")
    parser.add_argument("--trace", type=Path, help="an Azure trace (CSV); without: a log-normal mix of lengths")
    parser.add_argument("--seed", type=int, default=random.randrange(1 << 30))
    parser.add_argument("--only", choices=("continuous", "prefix", "chunked"))
    parser.add_argument("--cpu-time", action="store_true", help="one thread, its processor time: for busy machines")
    args = parser.parse_args()
    clock: Clock = time.process_time if args.cpu_time else time.perf_counter
    if args.cpu_time:
        torch.set_num_threads(1)
    rng = random.Random(args.seed)
    rows: list[dict[str, Any]] = []
    if args.only in (None, "continuous"):
        rows += bench_continuous(args.model, trace_lengths(args.trace, rng), rng, clock)
    if args.only in (None, "prefix"):
        rows.append(bench_prefix(args.model, rng, clock))
    if args.only in (None, "chunked"):
        rows.append(bench_chunked(args.model, rng, clock))
    for row in rows:
        print(json.dumps({"model": args.model or "SmolLM2-135M-Instruct", "seed": args.seed, **row}))


if __name__ == "__main__":
    main()
