"""The clusters of `benchmarks.clusters.roles` in simulated time: the router's policies on two GPUs that only count.

    python -m benchmarks.clusters.simulated --trace AzureLLMInferenceTrace_conv.csv --rates 20,40

Requests have the lengths of the trace, drawn at random, and come by Poisson. One row a rate and cluster, the mean of
the seeds; runs of the same seeds before and after a change of the policies are comparable. Takes seconds.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from statistics import mean

from cli.load.workload import read_trace
from router.routing.objectives import Objectives
from tests.router.objectives.simulation import open_loop

MODES = ("aggregated", "static", "adaptive")


def main() -> None:
    parser = argparse.ArgumentParser(description="Three clusters under a trace's lengths, in simulated time.")
    parser.add_argument("--trace", type=Path, required=True, help="Mooncake's .jsonl or Azure's .csv")
    parser.add_argument("--rates", default="20,40", help="requests a second")
    parser.add_argument("--seconds", type=float, default=60.0, help="of each run")
    parser.add_argument("--seeds", default="1,2,3")
    parser.add_argument("--longest", type=int, default=30_000, help="leave out prompts of more tokens")
    options = parser.parse_args()
    objectives = Objectives(ttft=1.0, itl=0.025)
    rows = read_trace(options.trace, max_requests=20_000)
    lengths = [
        (r.num_input_tokens, max(r.num_output_tokens, 1)) for r in rows if r.num_input_tokens <= options.longest
    ]
    seeds = [int(seed) for seed in options.seeds.split(",")]
    print(f"{'req/s':>6} {'cluster':10} {'tok/s':>7} {'goodput':>8} {'TTFT p99 ms':>12} {'gap p99 ms':>11}")
    for rate in map(float, options.rates.split(",")):
        for mode in MODES:
            runs = [open_loop(mode, objectives, rate, lengths, options.seconds, seed) for seed in seeds]
            print(
                f"{rate:6.1f} {mode:10} {mean(r.output_tokens_per_second for r in runs):7.0f} "
                f"{mean(r.good_per_second for r in runs):8.2f} {1e3 * mean(r.ttft_p99 for r in runs):12.0f} "
                f"{1e3 * mean(r.gap_p99 for r in runs):11.1f}"
            )


if __name__ == "__main__":
    main()
