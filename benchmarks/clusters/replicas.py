"""Throughput, latency and balance of replicas: 1, 2, ... workers of one role behind a router, each with --clients.

    python -m benchmarks.clusters.replicas --replicas 1,2 --clients 8 --model dry-run -- --num-threads 1
    python -m benchmarks.clusters.replicas --replicas 1,2 --clients 64 --gpus 0,1 \\
        --model benchmarks/configs/qwen2.5-7b --load-format dummy

A closed loop keeps --clients requests of --input and --output tokens open for each worker. `scaling` is the
throughput per worker relative to that with the first number of replicas: 1 is linear. `shares` are the workers'
shares of all requests, and `max_over_mean` is 1 if they are equal. Prints one JSON object per line. Unknown flags are
passed to `mini-infer serve`.

Replicas, router and clients share a machine's cores: on a CPU, throughput grows until these are used up.
"""

from __future__ import annotations

import argparse
import os
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import uvloop

from benchmarks.clusters.cells import Load
from benchmarks.clusters.roles import Bench
from benchmarks.harness import int_list, read_metric, report
from benchmarks.model_folder import with_tokenizer
from cli.cluster.ports import LOOPBACK, free_ports
from cli.local_cluster.local_server import LocalServer

PROMPT_TOKENS = "vllm:prefix_cache_queries_total"


def prompt_tokens(port: int) -> float:
    """Return the tokens of all prompts that a worker has begun. Prompts of equal lengths: a count of requests."""
    return read_metric(f"http://{LOOPBACK}:{port}/metrics", PROMPT_TOKENS)


def balance(counts: Sequence[float]) -> dict[str, Any]:
    """Return each worker's share of the sum, and the largest count over the mean."""
    total = max(sum(counts), 1.0)
    return {
        "shares": [round(count / total, 3) for count in counts],
        "max_over_mean": round(max(counts) * len(counts) / total, 3),
    }


def measure(num_replicas: int, options: argparse.Namespace, flags: list[str]) -> dict[str, Any]:
    """Start `num_replicas` workers, warm them up, measure, stop them."""
    ports = free_ports(num_replicas + 2)[:num_replicas]  # metrics ports; those of agent and router follow them
    options.clients = num_replicas * options.clients_per_worker
    bench = Bench(options)
    own = ["--prefill=0", f"--decode={num_replicas}", f"--metrics-port={ports[0]}"]
    with LocalServer([*own, *flags]) as server:
        uvloop.run(bench.warm(server.url))
        before = [prompt_tokens(port) for port in ports]
        cell = uvloop.run(bench.measure(server.url, f"{num_replicas} replicas", Load("closed"), options.seed + 2))
        counts = [prompt_tokens(port) - earlier for port, earlier in zip(ports, before, strict=True)]
    return {
        "replicas": num_replicas,
        "clients": options.clients,
        "tok_s": round(cell.output_tokens_per_second, 1),
        "ttft_ms": cell.ttft_ms,
        "itl_ms": cell.itl_ms,
        "requests": cell.num_requests,
        **balance(counts),
        "errors": cell.errors,
    }


def run(options: argparse.Namespace, flags: list[str]) -> None:
    found: list[dict[str, Any]] = []
    for num_replicas in options.replicas:
        figures = measure(num_replicas, options, flags)
        found.append(figures)
        linear = found[0]["tok_s"] * num_replicas / found[0]["replicas"]
        figures["scaling"] = round(figures["tok_s"] / max(linear, 1e-9), 3)
        report(figures)


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.clusters.replicas", description="Replicas behind the router.", allow_abbrev=False
    )
    parser.add_argument("--replicas", type=int_list, default=[1, 2], help="numbers of workers: 1,2,4")
    parser.add_argument("--clients", dest="clients_per_worker", type=int, default=8, help="of each worker")
    parser.add_argument("--input", type=int, default=64, help="tokens of a prompt")
    parser.add_argument("--output", type=int, default=64, help="tokens of an answer")
    parser.add_argument("--seconds", type=float, default=20.0, help="of each number of replicas")
    parser.add_argument("--gpus", default="", help="CUDA_VISIBLE_DEVICES of the workers")
    parser.add_argument("--seed", type=int, default=0)
    options, flags = parser.parse_known_args()
    if options.gpus:
        os.environ["CUDA_VISIBLE_DEVICES"] = options.gpus
    options.ttft_ms = options.itl_ms = 0.0  # no objectives
    with tempfile.TemporaryDirectory(prefix="mini-infer-") as folder:
        flags, options.vocab_size = with_tokenizer([flag for flag in flags if flag != "--"], Path(folder))
        run(options, flags)


if __name__ == "__main__":
    main()
