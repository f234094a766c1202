"""`mini-infer bench`: load any OpenAI-compatible server and report client-side latency and throughput.

Converts flags to a workload and a target, runs them, prints, and writes JSON and a plot. Neither this module nor the
others in `cli/load` know which server answers.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import dataclasses
import importlib.util
import json
import math
import os
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import uvloop
from rich.console import Console
from rich.table import Table

from cli.client.api_client import first_model, server_root
from cli.client.event_stream import RequestRecord
from cli.load.client import Client, Target
from cli.load.plot import plot
from cli.load.progress import RunProgress, shown
from cli.load.results import Objectives, summarize
from cli.load.runner import closed_loop, open_loop
from cli.load.workload import PlannedRequest, PromptMaker, parse_range, random_workload, read_trace, trace_workload
from common.config import SettingsParser, add_arguments, check_not_negative, from_namespace, setting
from common.errors import ConfigError

WARMUP_OUTPUT_TOKENS = 4
DEFAULT_CONCURRENCY = 8  # of a closed loop
PICTURES = (".png", ".svg", ".pdf")


@dataclass(frozen=True)
class TargetConfig(Target):
    """Load an OpenAI-compatible server and measure it."""

    url: str = setting("http://127.0.0.1:8000", "the server's root")
    model: str = setting("", "model name to ask for; empty: the first one that the server lists")
    api_key: str = setting("", "sent as Bearer token")
    endpoint: str = setting("completions", "which endpoint", choices=("completions", "chat"))
    exact_output: bool = setting(True, "send ignore_eos and min_tokens, so that output lengths are exact")
    temperature: float = setting(0.0, "sampling temperature")
    timeout_seconds: float = setting(600.0, "per request")


@dataclass(frozen=True)
class WorkloadConfig:
    """The workload to send."""

    num_requests: int = setting(64, "requests, when no trace is given")
    concurrency: int = setting(0, "requests open at a time; 0: 8, or no bound with --request-rate or --trace")
    request_rate: float = setting(0.0, "requests a second, with exponential gaps; 0: as fast as --concurrency allows")
    input_len: str = setting("128", "prompt tokens: a number or a range such as 100-1024")
    output_len: str = setting("64", "output tokens: a number or a range")
    vocab_size: int = setting(0, "send prompts as token ids below this; 0: as words of about a token each")
    trace: str = setting("", "trace file: Mooncake .jsonl or Azure .csv")
    trace_scale: float = setting(1.0, "replay the trace this many times as fast")
    length_scale: float = setting(1.0, "multiply all lengths of the trace")
    max_requests: int = setting(0, "rows of the trace; 0: all")
    duration: float = setting(0.0, "send for this many seconds; 0: no limit")
    warmup: int = setting(2, "requests before the measurement")
    seed: int = setting(0, "of prompts, lengths and arrivals")

    def __post_init__(self) -> None:
        for name in ("num_requests", "trace_scale", "length_scale"):
            if not 0 < getattr(self, name) < math.inf:
                raise ConfigError(f"--{name.replace('_', '-')} must be positive")
        check_not_negative(self, "concurrency", "request_rate", "max_requests", "duration", "warmup")

    @property
    def is_closed(self) -> bool:
        """Whether requests wait for the ends of others rather than for a time."""
        return not (self.request_rate or self.trace)


@dataclass(frozen=True)
class ReportConfig:
    """The report to write. Raises ConfigError before the measurement if a file could not be written."""

    slo_ttft_ms: float = setting(0.0, "objective for the time to first token; 0: none")
    slo_itl_ms: float = setting(0.0, "objective for the 99th percentile of a request's gaps; 0: none")
    json: str = setting("", "write the result to this file; -: standard output")
    plot: str = setting("", "draw distributions and throughput into this file (.png, .svg, .pdf)")

    def __post_init__(self) -> None:
        for flag, path in (("--json", self.json), ("--plot", self.plot)):
            folder = Path(path).parent
            if path not in ("", "-") and not (folder.is_dir() and os.access(folder, os.W_OK)):
                raise ConfigError(f"{flag} {path}: {folder} is not a directory that can be written to")
        if self.plot and Path(self.plot).suffix not in PICTURES:
            raise ConfigError(f"--plot {self.plot}: choose a name that ends with {', '.join(PICTURES)}")
        if self.plot and importlib.util.find_spec("matplotlib") is None:
            raise ConfigError("--plot needs matplotlib: pip install matplotlib")


def build_parser() -> argparse.ArgumentParser:
    parser = SettingsParser(prog="mini-infer bench", description=TargetConfig.__doc__)
    for title, cls in (("server", TargetConfig), ("workload", WorkloadConfig), ("report", ReportConfig)):
        add_arguments(parser.add_argument_group(title), cls)
    return parser


def run(argv: Sequence[str]) -> int:
    """Run the command. Return 1 if no request succeeded, 130 after Ctrl-C, which ends the measurement."""
    namespace = build_parser().parse_args(argv)
    # Only the key is read from the environment: MINI_INFER_MODEL and others are a server's settings.
    env = {name: value for name, value in os.environ.items() if name == "MINI_INFER_API_KEY"}
    target = from_namespace(TargetConfig, namespace, env)
    workload = from_namespace(WorkloadConfig, namespace, {})
    report = from_namespace(ReportConfig, namespace, {})
    model = target.model or first_model(target.url, target.api_key)
    target = dataclasses.replace(target, url=server_root(target.url), model=model)
    objectives = Objectives(report.slo_ttft_ms, report.slo_itl_ms)
    records, is_interrupted = uvloop.run(drive(target, workload))
    begin = min((record.sent for record in records), default=0.0)
    duration = max((record.end for record in records), default=0.0) - begin
    summary = {
        "url": target.url, "model": target.model, "endpoint": target.endpoint,
        "workload": dataclasses.asdict(workload),
    } | summarize(records, duration, objectives)  # fmt: skip
    show(summary)
    write_json(summary, report.json)
    if report.plot:
        plot(records, Path(report.plot), f"{target.model}: {len(records)} requests")
    if is_interrupted:
        return 130
    return 0 if summary["num_completed"] else 1


def plan(workload: WorkloadConfig) -> tuple[int, Iterable[PlannedRequest]]:
    """Return the number of requests, and the requests."""
    maker = PromptMaker(workload.vocab_size)
    if workload.trace:
        seconds_of_trace = workload.duration * workload.trace_scale
        rows = read_trace(Path(workload.trace), workload.max_requests, seconds_of_trace)
        return len(rows), trace_workload(maker, rows, workload.trace_scale, workload.length_scale, workload.seed)
    requests = random_workload(
        maker,
        workload.num_requests,
        parse_range(workload.input_len, "--input-len"),
        parse_range(workload.output_len, "--output-len"),
        workload.request_rate,
        workload.seed,
    )
    return len(requests), requests


async def drive(target: TargetConfig, workload: WorkloadConfig) -> tuple[list[RequestRecord], bool]:
    """Warm up, then send the workload and show progress. Return finished records, and whether Ctrl-C stopped the
    rest."""
    client = Client(target, target.timeout_seconds)
    total, requests = plan(workload)
    rng_seed = workload.seed + 1  # warm-up prompts must not put the measured ones into the prefix cache
    warmup = random_workload(
        PromptMaker(workload.vocab_size), workload.warmup, (32, 64), (WARMUP_OUTPUT_TOKENS,) * 2, 0.0, rng_seed
    )
    try:
        with Console(stderr=True).status("warming up") if sys.stderr.isatty() else contextlib.nullcontext():
            await closed_loop(client.complete, warmup, 1, lambda _record: None)
        progress = RunProgress(total, client.open_records)
        records: list[RequestRecord] = []

        def on_done(record: RequestRecord) -> None:
            records.append(record)
            progress.on_done(record)

        try:
            async with shown(progress):
                if workload.is_closed:
                    concurrency = workload.concurrency or DEFAULT_CONCURRENCY
                    await closed_loop(client.complete, requests, concurrency, on_done, workload.duration)
                else:
                    await open_loop(client.complete, requests, on_done, workload.concurrency, workload.duration)
        except asyncio.CancelledError:
            if not records:
                raise
            return records, True
        return records, False
    finally:
        client.close()


def show(summary: dict[str, Any]) -> None:
    """Print the summary as tables on standard error."""
    console = Console(stderr=True)
    console.print(
        f"{summary['num_completed']}/{summary['num_requests']} requests in {summary['duration_seconds']:.2f} s: "
        f"{summary['requests_per_second']:.2f} requests/s, {summary['input_tokens_per_second']:.0f} tokens/s in, "
        f"{summary['output_tokens_per_second']:.0f} tokens/s out, {summary['cached_tokens']} prompt tokens cached",
        highlight=False,
    )
    table = Table("ms", "mean", "p50", "p90", "p99", "max")
    for column in table.columns[1:]:
        column.justify = "right"
    for name in ("ttft", "itl", "tpot", "e2e"):
        if values := summary[f"{name}_ms"]:
            table.add_row(name, *(f"{value:.2f}" for value in values.values()))
    console.print(table)
    if any(summary["slo"].values()):
        console.print(
            f"goodput: {summary['good_requests_per_second']:.2f} requests/s, {summary['good_fraction']:.1%}"
        )
    for kind, count in summary["errors"].items():
        console.print(f"failed: {count} x {kind}", style="red")
    if message := summary["first_error_message"]:
        console.print(f"the first one: {message}", style="red", highlight=False, markup=False, soft_wrap=True)


def write_json(summary: dict[str, Any], path: str) -> None:
    """Write the summary to a file, or to standard output for "-". Raises ConfigError."""
    text = json.dumps(summary, indent=2)
    if path == "-":
        print(text)
    elif path:
        try:
            Path(path).write_text(text + "\n", encoding="utf-8")
        except OSError as error:
            raise ConfigError(f"--json {path}: {error.strerror}") from error
