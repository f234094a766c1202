"""Three clusters on the same devices under the same loads: aggregated, static roles, adaptive placement.

    python -m benchmarks.clusters.roles --model benchmarks/configs/qwen2.5-7b --load-format dummy --gpus 0,1 \\
        --loads closed,azure:20:40 --seconds 15 --json cluster.json --plot cluster.png
    python -m benchmarks.clusters.roles --from cluster.json --plot cluster.png

A load is `closed` (--clients, each with one request of --input and --output tokens open) or `TRACE:RATE[:RATE...]`:
the trace's first requests in its own order and rhythm, so many a second. Goodput is requests a second whose first
token came within --ttft-ms and the 99th percentile of whose gaps is below --itl-ms. Flags that are not known here go
to `mini-infer serve`. A directory with nothing but a config.json gets a tokenizer whose every token is a word of its
own, and prompts of token ids: then each token of an answer is seen when it comes.

The JSON is written after each cell, so that a run that is cut off leaves what it has measured.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import re
import sys
import tempfile
import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict, replace
from pathlib import Path

import httpx
import uvloop

from benchmarks.clusters.cells import HEADER, Cell, Load, draw, row
from benchmarks.model_folder import with_tokenizer
from cli.client.api_client import first_model
from cli.client.event_stream import RequestRecord
from cli.load.client import Client, Target
from cli.load.plot import tokens_over_time
from cli.load.results import Objectives, distribution_ms, summarize
from cli.load.runner import closed_loop, open_loop
from cli.load.workload import PlannedRequest, PromptMaker, TraceRow, random_workload, read_trace, trace_workload
from cli.local_cluster.local_server import LocalServer
from common.errors import ConfigError

TIMES = ("queue", "prefill")
TRACES = {"azure": "AzureLLMInferenceTrace_conv.csv", "mooncake": "conversation_trace.jsonl"}
SETTLED = 0.25  # share of a closed loop's time before its throughput counts
GRACE_SECONDS = 6.0  # for the answers of requests that arrived in time
WARM_SECONDS = 4.0
QUIET_SECONDS = 10.0


def serve_flags(cluster: str, ttft_ms: float, itl_ms: float) -> list[str]:
    """Return the flags of `mini-infer serve` for one of the clusters."""
    return {
        "aggregated": ["--prefill=0", "--decode=2"],
        "static": ["--prefill=1", "--decode=1"],
        "adaptive": ["--prefill=1", "--decode=1", f"--ttft-objective-ms={ttft_ms}", f"--itl-objective-ms={itl_ms}"],
    }[cluster]


def parse_loads(text: str) -> list[Load]:
    """Parse `closed,azure:10:20`. Raises ConfigError."""
    loads = []
    for item in text.split(","):
        name, *rates = item.split(":")
        if (name == "closed") == bool(rates) or name not in ("closed", *TRACES):
            raise ConfigError(
                f"--loads {item!r}: expected closed, or one of {', '.join(TRACES)} with rates: azure:10:20"
            )
        try:
            loads += [Load(name, float(rate)) for rate in rates] or [Load(name)]
        except ValueError:
            raise ConfigError(f"--loads {item!r}: a rate is no number") from None
    return loads


def scaled_rows(rows: Sequence[TraceRow], rate: float, seconds: float, longest: int) -> list[TraceRow]:
    """Return the first rows at `rate` per second for `seconds`, of at most `longest` tokens each (0: no limit)."""
    fitting = [row for row in rows if not longest or row.num_input_tokens + row.num_output_tokens <= longest]
    taken = fitting[: max(round(rate * seconds), 1)]
    span = max(taken[-1].at_seconds - taken[0].at_seconds, 1e-9)
    times = [(row.at_seconds - taken[0].at_seconds) * seconds / span for row in taken]
    return [
        TraceRow(at, row.num_input_tokens, row.num_output_tokens, row.block_ids)
        for at, row in zip(times, taken, strict=True)
    ]


class Bench:
    """Runs loads on one cluster after another; `options` are the program's arguments."""

    def __init__(self, options: argparse.Namespace) -> None:
        self._options = options
        self._maker = PromptMaker(options.vocab_size)
        self._objectives = Objectives(options.ttft_ms, options.itl_ms)

    def requests(self, load: Load, seed: int) -> Iterable[PlannedRequest]:
        """Return prompts that no earlier cell of the cluster had, since their KV may be cached."""
        options = self._options
        if not load.rate:
            length = (options.input, options.input), (options.output, options.output)
            return random_workload(self._maker, 1 << 14, *length, 0.0, seed)
        rows = read_trace(Path(options.traces, TRACES[load.name]), max_requests=20_000)
        chosen = scaled_rows(rows, load.rate, options.seconds, options.longest)
        return trace_workload(self._maker, chosen, 1.0, options.length_scale, seed)

    async def measure(self, url: str, cluster: str, load: Load, seed: int) -> Cell:
        """Measure one cell. Requests open at its end are cancelled, and count as not good."""
        target = Target(url, first_model(url))
        seconds = self._options.seconds
        before = counters(url)
        planned = self.requests(load, seed)
        if load.rate:
            client = Client(target, stop_after_seconds=seconds + GRACE_SECONDS)
            records = await open_loop(client.complete, list(planned), lambda record: None)
        else:
            client = Client(target, stop_after_seconds=seconds)
            clients = self._options.clients
            records = await closed_loop(client.complete, planned, clients, lambda record: None, seconds)
        client.close()
        after = counters(url)
        await until_quiet(url)
        counted = {name: after[name] - before.get(name, 0.0) for name in after}
        means = {
            name: 1e3 * counted.pop(f"{name}_sum", 0.0) / (counted.pop(f"{name}_count", 0.0) or 1.0) for name in TIMES
        }
        return replace(
            self._cell(cluster, load, records, counted), queue_ms=means["queue"], prefill_ms=means["prefill"],
            step_seconds=step_seconds(url),
        )  # fmt: skip

    def _cell(self, cluster: str, load: Load, records: list[RequestRecord], counted: dict[str, float]) -> Cell:
        seconds = self._options.seconds
        if not load.rate:  # requests cut off at the end are neither good nor bad, those of the start have not settled
            records = [record for record in records if record.error != "timeout" or record.chunk_times]
        for record in records:
            record.num_output_tokens = record.num_output_tokens or len(record.chunk_times)
        rates = tokens_over_time(records, 1.0)[int(SETTLED * seconds) : int(seconds)] or [0.0]
        settled = [r for r in records if load.rate or (r.sent >= SETTLED * seconds and r.error != "timeout")]
        good = sum(self._objectives.met_by(record) for record in settled)
        summary = summarize(settled, seconds, self._objectives)
        return Cell(
            cluster, load.name, load.rate,
            output_tokens_per_second=sum(rates) / len(rates),
            good_per_second=good / (seconds if load.rate else (1 - SETTLED) * seconds),
            good_fraction=good / max(len(settled), 1),
            ttft_ms=summary["ttft_ms"],
            itl_ms=summary["itl_ms"],
            placements=counted,
            num_requests=len(settled),
            errors=summary["errors"],
            first_gap_ms=distribution_ms([record.gaps[0] for record in settled if record.gaps]),
        )  # fmt: skip

    async def warm(self, url: str) -> None:
        """Run the closed loop for a few seconds, so that kernels are compiled and rates measured."""
        options = self._options
        length = (options.input, options.input), (options.output, options.output)
        planned = random_workload(self._maker, 1 << 14, *length, 0.0, options.seed + 1)
        client = Client(Target(url, first_model(url)), stop_after_seconds=4 * WARM_SECONDS)
        num_clients = max(options.clients // 8, 2)
        await closed_loop(client.complete, planned, num_clients, lambda record: None, WARM_SECONDS)
        client.close()
        await until_quiet(url)


def counters(url: str) -> dict[str, float]:
    """Return the router's totals: placements by kind, moves, and sums and counts of TIMES."""
    text = httpx.get(url + "/metrics", timeout=10.0).text
    pattern = r'^mini_infer_(?:placements|moves)_total\{(?:.*placement="(\w+)")?[^}]*\} (\S+)'
    found = {name or "moves": float(value) for name, value in re.findall(pattern, text, re.MULTILINE)}
    times = rf"^vllm:request_({'|'.join(TIMES)})_time_seconds_(sum|count)(?:\{{[^}}]*\}})? (\S+)"
    return found | {f"{name}_{part}": float(value) for name, part, value in re.findall(times, text, re.MULTILINE)}


def step_seconds(url: str) -> dict[str, dict[str, float]]:
    """Return the step costs that the router has learned for each worker."""
    workers = httpx.get(url + "/v1/cluster", timeout=10.0).json()["workers"]
    return {worker["id"]: worker["step_seconds_by_part"] for worker in workers}


async def until_quiet(url: str) -> None:
    """Wait until no worker has a request, for at most QUIET_SECONDS."""
    deadline = time.monotonic() + QUIET_SECONDS
    while time.monotonic() < deadline:
        reply = await asyncio.to_thread(httpx.get, url + "/v1/cluster", timeout=10.0)
        workers = reply.json()["workers"]
        if not any(worker["open_requests"] for worker in workers):
            return
        await asyncio.sleep(0.1)


def run(options: argparse.Namespace, flags: list[str]) -> list[Cell]:
    """Measure every cell."""
    if options.model:
        flags = [f"--model={options.model}", *flags]
    with tempfile.TemporaryDirectory(prefix="mini-infer-") as folder:
        flags, vocab_size = with_tokenizer(flags, Path(folder))
        options.vocab_size = options.vocab_size or vocab_size
        return measure_all(options, flags)


def measure_all(options: argparse.Namespace, flags: list[str]) -> list[Cell]:
    loads = parse_loads(options.loads)
    bench, cells = Bench(options), []
    if options.gpus:
        os.environ["CUDA_VISIBLE_DEVICES"] = options.gpus
    print(HEADER, flush=True)
    for cluster in options.clusters.split(","):
        began = time.monotonic()
        with LocalServer([*serve_flags(cluster, options.ttft_ms, options.itl_ms), *flags]) as server:
            uvloop.run(bench.warm(server.url))
            print(f"# {cluster} is ready and warm after {time.monotonic() - began:.1f} s", file=sys.stderr)
            for number, load in enumerate(loads):
                seed = options.seed + 2 + number  # the same for all clusters, and not that of `warm`
                cells.append(uvloop.run(bench.measure(server.url, cluster, load, seed)))
                print(row(cells[-1]), flush=True)
                if options.json:
                    document = {"argv": sys.argv[1:], "cells": [asdict(cell) for cell in cells]}
                    Path(options.json).write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    return cells


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.clusters.roles",
        description="Aggregated, static and adaptive clusters.",
        allow_abbrev=False,
    )
    parser.add_argument("--model", default="", help="as of `mini-infer serve`")
    parser.add_argument("--clusters", default="aggregated,static,adaptive")
    parser.add_argument(
        "--loads", default="closed,azure:2", help="closed, azure:RATE:..., mooncake:RATE:..., by commas"
    )
    parser.add_argument("--seconds", type=float, default=20.0, help="of each cell")
    parser.add_argument("--clients", type=int, default=256, help="of the closed loop")
    parser.add_argument("--input", type=int, default=1024, help="tokens of a prompt in the closed loop")
    parser.add_argument("--output", type=int, default=128, help="tokens of an answer there")
    parser.add_argument("--ttft-ms", type=float, default=1000.0)
    parser.add_argument("--itl-ms", type=float, default=25.0)
    parser.add_argument("--traces", default="/work/shared/traces", help="directory of the traces")
    parser.add_argument("--length-scale", type=float, default=1.0, help="multiplies the lengths of traces")
    parser.add_argument(
        "--longest", type=int, default=0, help="leave out rows of more tokens, before they are scaled"
    )
    parser.add_argument("--vocab-size", type=int, default=0, help="prompts of token ids below this; 0: words")
    parser.add_argument("--gpus", default="", help="CUDA_VISIBLE_DEVICES of the workers")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", default="", help="write the result there, after each cell")
    parser.add_argument("--plot", default="", help="draw it (.png, .svg, .pdf)")
    parser.add_argument("--title", default="Clusters of two workers", help="of --plot")
    parser.add_argument("--from", dest="source", default="", help="draw this JSON and measure nothing")
    options, flags = parser.parse_known_args()
    if options.source:
        document = json.loads(Path(options.source).read_text(encoding="utf-8"))
        cells = [Cell(**cell) for cell in document["cells"]]
        print(HEADER, *map(row, cells), sep="\n")
    else:
        cells = run(options, [flag for flag in flags if flag != "--"])
    if options.plot:
        draw(cells, Path(options.plot), options.title, options.ttft_ms, options.itl_ms)


if __name__ == "__main__":
    main()
