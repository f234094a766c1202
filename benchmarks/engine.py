"""Speed of one engine, without services: decode at several batch sizes, prefill, and a mixed offline load.

    python -m benchmarks.engine --batch 1,8,64 --input 1024 --output 128 --json
    python -m benchmarks.engine --model DIR --load-format dummy --prefill 2048,8192 --offline256

Prompts are drawn fresh in every run and the prefix cache is off, so nothing is measured that a cache gave. All engine
settings are flags (`--device`, `--dtype`, `--quant-mode`, ...), with the defaults of `mini_infer.LLM`. Each figure
stands beside its floor on this machine.
"""

from __future__ import annotations

import argparse
import gc
import random
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from benchmarks.harness import greedy, int_list, num_output_tokens, prefill, random_prompt, report, trace_lengths
from benchmarks.profile.floors import Peaks, decode_floor_seconds, measure_peaks, prefill_floor_seconds
from common.config import add_arguments, from_namespace
from common.errors import ConfigError
from common.model_files import resolve_model
from engine.assembly import EngineParts, assemble
from engine.config import EngineConfig, GpuConfig
from engine.kv.memory import DTYPE_NAMES, kv_layout
from engine.kv_groups.of_layout import block_groups
from engine.loader.load import read_config, resolve_device
from engine.request import Request, RequestStatus

OFFLINE_REQUESTS, OFFLINE_MIN, OFFLINE_MAX = 256, 100, 1024
PREFILL_REPEATS = 3


@dataclass(frozen=True)
class Bench:
    """One loaded engine, and the peaks that its figures are compared with."""

    parts: EngineParts
    peaks: Peaks
    random: random.Random

    def add(self, num_input: int, num_output: int) -> Request:
        prompt = random_prompt(self.random, self.parts.loaded.config.vocab_size, num_input)
        return self.parts.engine.add_request(prompt, greedy(num_output))


def main(argv: Sequence[str] | None = None) -> int:
    options, bench = opened(argv)
    for batch in options.batch:
        report(decode_rounds(bench, prompt_lengths(options, batch), options.output, options.rounds), options.json)
    for num_tokens in options.prefill:
        report(prefill_figures(bench, num_tokens), options.json)
    if options.offline256:
        report(offline_figures(bench), options.json)
    return 0


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.engine", description="Speed of one engine.")
    add_arguments(parser, EngineConfig)
    add_arguments(parser, GpuConfig)
    parser.add_argument("--batch", type=int_list, default=[], help="sequences that decode together: 1,8,64")
    parser.add_argument("--input", type=int, default=1024, help="prompt tokens of --batch")
    parser.add_argument(
        "--trace", type=Path, help="trace file: sequences of --batch have the lengths of its requests"
    )
    parser.add_argument("--longest", type=int, default=30_000, help="tokens of a request, of --trace")
    parser.add_argument("--output", type=int, default=128, help="generated tokens of --batch")
    parser.add_argument(
        "--rounds", type=int, default=1, help="of each --batch; several: their median, after one more"
    )
    parser.add_argument("--prefill", type=int_list, default=[], help="single prompts of these lengths")
    parser.add_argument("--one-at-a-time", action="store_true", help="with --pp: one step in flight, of all rows")
    parser.add_argument("--offline256", action="store_true", help="256 requests, 100 to 1024 tokens in and out")
    parser.add_argument("--bandwidth", type=float, default=0.0, help="GB/s of memory for the floor; 0: measure")
    parser.add_argument("--json", action="store_true", help="one JSON object a line")
    options = parser.parse_args(argv)
    if not (options.batch or options.prefill or options.offline256):
        options.batch = [1, 8]
    return options


def prompt_lengths(options: argparse.Namespace, batch: int) -> list[int]:
    """Return the prompt tokens of each sequence of a batch."""
    if options.trace:
        return trace_lengths(options.trace, batch, options.longest, seed=0)
    return [options.input] * batch


def opened(argv: Sequence[str] | None) -> tuple[argparse.Namespace, Bench]:
    """Parse flags and load the model. Exits with status 2 and the reason for settings that cannot work."""
    options = parse(argv)
    try:
        return options, open_bench(options)
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)


def open_bench(options: argparse.Namespace) -> Bench:
    """Load the model, with room for the largest load."""
    config = from_namespace(EngineConfig, options)
    config = config.resolved(resolve_device(config).type, is_offline=True)
    loads = [[each + options.output for each in prompt_lengths(options, batch)] for batch in options.batch]
    loads += [[num_tokens + 1] for num_tokens in options.prefill]
    sequences = max(options.batch, default=config.max_num_seqs)
    if options.offline256:
        sequences = max(sequences, config.max_num_seqs)
    config = replace(
        config,
        max_num_seqs=sequences,
        max_num_batched_tokens=max(config.max_num_batched_tokens, sequences),
        prefix_cache=False,
    )
    if not config.num_gpu_blocks:
        layout = kv_layout(read_config(resolve_model(config.model), config), torch.bfloat16)
        groups = block_groups(layout, config.block_size, config.max_num_batched_tokens)
        needed = [sum(groups.most_live(tokens) + groups.num_groups for tokens in load) for load in loads]
        blocks = max(needed, default=0)
        if options.offline256:  # a mean sequence needs 1,124 tokens
            blocks = max(blocks, sequences * groups.most_live(2 * OFFLINE_MAX) * 2 // 3)
        config = replace(config, num_gpu_blocks=blocks)
    gpu = from_namespace(GpuConfig, options)
    began = time.perf_counter()
    parts = assemble(config, gpu=replace(gpu, overlap=False) if options.one_at_a_time and config.pp > 1 else gpu)
    ready_seconds = time.perf_counter() - began
    gc.collect()
    gc.freeze()  # as an engine process does
    device = parts.loaded.device
    peaks = measure_peaks(device, parts.loaded.dtype)
    if device.type != "cpu":  # each rank has a GPU; stages read their weights once for each of as many steps
        peaks = Peaks(peaks.read_bytes_per_second * config.tp, peaks.flops_per_second * config.num_ranks)
    if options.bandwidth:
        peaks = replace(peaks, read_bytes_per_second=options.bandwidth * 1e9)
    print(
        f"ready in {ready_seconds:.1f} s, memory {peaks.read_bytes_per_second / 1e9:.0f} GB/s, "
        f"GEMMs {peaks.flops_per_second / 1e12:.2f} TFLOP/s",
        file=sys.stderr,
    )
    return Bench(parts, peaks, random.Random())


def decode_rounds(bench: Bench, lengths: Sequence[int], num_output: int, rounds: int) -> dict[str, Any]:
    """Return the run of median speed, with the slowest and the fastest of `rounds`.

    With several rounds, one more comes first: without graphs, it compiles kernels.
    """
    if rounds == 1:
        return decode_figures(bench, lengths, num_output)
    runs = [decode_figures(bench, lengths, num_output) for _ in range(1 + rounds)][1:]
    runs.sort(key=lambda figures: figures["tok_s"])
    ends = {"tok_s_min": runs[0]["tok_s"], "tok_s_max": runs[-1]["tok_s"], "rounds": rounds}
    return {**runs[rounds // 2], **ends}


def decode_figures(bench: Bench, lengths: Sequence[int], num_output: int) -> dict[str, Any]:
    """Compute prompts of these lengths, then measure the steps in which every sequence gets one token."""
    engine, config = bench.parts.engine, bench.parts.loaded.config
    batch, num_input = len(lengths), sum(lengths) / len(lengths)
    requests = [bench.add(num_tokens, num_output) for num_tokens in lengths]
    began = time.perf_counter()
    prefill(engine, requests)
    prefilled = time.perf_counter()
    done = num_output_tokens(requests)
    steps = 0
    full = 0.0  # seconds until the first sequence ends; prompts in several chunks start at different steps
    num_full = done
    while engine.has_work():
        if all(request.status is RequestStatus.RUNNING for request in requests):
            full = time.perf_counter() - prefilled
            num_full = num_output_tokens(requests)
        engine.step()
        steps += 1
    seconds = time.perf_counter() - prefilled
    num_tokens = num_output_tokens(requests) - done
    parts, loaded = bench.parts, bench.parts.loaded
    mean_context = num_input + num_output / 2
    floor = decode_floor_seconds(
        config, DTYPE_NAMES[loaded.dtype], loaded.quant_mode, batch, mean_context, bench.peaks, parts.geometry.dtype
    )
    tokens_per_second = num_tokens / seconds
    return {
        **identity(bench),
        "batch": batch,
        "input": round(num_input),
        "output": num_output,
        "tpot_ms": round(seconds / max(steps, 1) * 1e3, 3),
        "rows_per_step": round(num_tokens / max(steps, 1), 1),
        "tok_s": round(tokens_per_second, 1),
        "full_batch_tok_s": round((num_full - done) / full, 1) if full else 0.0,
        "prefill_s": round(prefilled - began, 4),
        "floor_tok_s": round(batch / floor, 1),
        "fraction_of_floor": round(tokens_per_second * floor / batch, 3),
    }


def prefill_figures(bench: Bench, num_tokens: int) -> dict[str, Any]:
    """Return the time to the first token of one prompt on an idle engine; the best of a few runs."""
    best = float("inf")
    for _ in range(PREFILL_REPEATS):
        bench.add(num_tokens, 1)
        began = time.perf_counter()
        while bench.parts.engine.has_work():
            bench.parts.engine.step()
        best = min(best, time.perf_counter() - began)
    floor = prefill_floor_seconds(bench.parts.loaded.config, num_tokens, bench.peaks)
    return {
        **identity(bench),
        "prefill": num_tokens,
        "prefill_s": round(best, 4),
        "tok_s": round(num_tokens / best, 1),
        "floor_s": round(floor, 4),
        "fraction_of_floor": round(floor / best, 3),
    }


def offline_figures(bench: Bench) -> dict[str, Any]:
    """Send all requests at once; return the output tokens per second until the last one ends."""
    draw = bench.random.randint
    requests = [
        bench.add(draw(OFFLINE_MIN, OFFLINE_MAX), draw(OFFLINE_MIN, OFFLINE_MAX)) for _ in range(OFFLINE_REQUESTS)
    ]
    began = time.perf_counter()
    shown = began
    while bench.parts.engine.has_work():
        bench.parts.engine.step()
        if time.perf_counter() - shown > 10:
            shown = time.perf_counter()
            print(f"offline256: {num_output_tokens(requests)} tokens after {shown - began:.0f} s", file=sys.stderr)
    seconds = time.perf_counter() - began
    num_output = num_output_tokens(requests)
    num_input = sum(request.num_prompt_tokens for request in requests)
    return {
        **identity(bench),
        "offline": OFFLINE_REQUESTS,
        "seconds": round(seconds, 2),
        "tok_s": round(num_output / seconds, 1),
        "total_tok_s": round((num_input + num_output) / seconds, 1),
    }


def identity(bench: Bench) -> dict[str, Any]:
    loaded = bench.parts.loaded
    return {
        "model": bench.parts.files.name,
        "device": str(loaded.device),
        "dtype": DTYPE_NAMES[loaded.dtype],
        "kv_dtype": bench.parts.geometry.dtype,
        "quant_mode": loaded.quant_mode,
    }


if __name__ == "__main__":
    sys.exit(main())
