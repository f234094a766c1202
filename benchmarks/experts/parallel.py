"""A synthetic layer of experts over several ranks: dispatch, experts and combine, padded, packed and grouped.

    python -m benchmarks.experts.parallel --device cuda --ranks 2 --tokens 64,1024 --json
    python -m benchmarks.experts.parallel --ranks 2 --hidden 512 --inner 256 --tokens 64
    python -m benchmarks.experts.parallel --ranks 2 --tokens 512 --routing skewed --placement balanced --redundant 2

A process for each rank, with a GPU each or on the CPU; tokens are those of all ranks, half of them on each of two.
The forms are those of `engine/expert_parallel/exchange.py`: padded moves every row to every rank and computes every
expert for all of them, packed moves what is needed, grouped computes what is needed, too. `exchange` is dispatch and
combine without the layer around them. Routing is `uniform`, or `skewed`: expert e is chosen in proportion to
1 / (e + 1), so that the first rank has most of the work. Bytes are counted where they are sent; `ideal` is each row
once to each other rank that has an expert of it, and one partial sum back. Each form's output is compared with the
whole layer's.

A `balanced` placement is made of the loads of other rows than those measured. A `rebalanced` one is that, too, but
ranks begin without it (with replicas of the first experts) and exchange experts as they do while serving: `move_us`
is how long that takes, `moved` how many slots get another expert. `imbalance` is the rows that experts of the busiest
rank compute, over the mean of ranks.
"""

from __future__ import annotations

import argparse
import queue
import socket
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.multiprocessing

from benchmarks.experts.layers import (
    DTYPES,
    imbalance_of,
    make_block,
    make_rows,
    place_experts,
    profiled_placement,
)
from benchmarks.experts.ranks import CpuRanks, GpuRanks, Ranks, share_fds
from benchmarks.harness import add_cpu_time_argument, int_list, report
from engine.expert_balancing.moves import moves_between
from engine.expert_balancing.placement import Slots, with_fewest_moves
from engine.expert_parallel.exchange import ExchangeForm, ideal_bytes
from engine.moe.moe import Moe
from kvstore.layout import Shard

ROUTINGS = ("uniform", "skewed")
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2}


@dataclass(frozen=True)
class Found:
    """One rank's measurements of a form. Times in microseconds."""

    form: str
    layer_us: float
    exchange_us: float
    dispatched_bytes: int
    combined_bytes: int
    ideal_dispatched_bytes: int
    ideal_combined_bytes: int
    error: float  # relative, compared with one rank
    imbalance: float
    move_us: float
    moved: int


def run_rank(shard: Shard, folder: str, link: socket.socket, results: Any, options: argparse.Namespace) -> None:
    device = torch.device("cpu") if options.device == "cpu" else torch.device("cuda", shard.rank)
    ranks: Ranks
    if options.device == "cpu":
        ranks = CpuRanks(shard, folder, options.seconds, options)
    else:
        ranks = GpuRanks(
            shard, folder, link, max(options.tokens), options.hidden, options.top_k, DTYPES[options.dtype]
        )
    with torch.inference_mode():
        for routing in options.routing:
            whole = make_block(options, device, routing)
            block = make_block(options, device, routing, shard, place_experts(whole, options, device))
            move_us, moved = 0.0, 0
            if options.placement == "rebalanced":
                move_us, moved = rebalance(block, ranks, profiled_placement(whole, options, device))
            for num_tokens in options.tokens:
                x = make_rows(num_tokens // shard.size, shard.rank, options, device)
                chosen = [each.cpu() for each in ranks.gather(block.route(x)[1])]
                ideal = ideal_bytes(chosen, shard.rank, block.rule.num_slots, x.shape[1] * x.itemsize)
                expected = whole(x, None)  # type: ignore[arg-type]  # experts need nothing of a step
                for form in ExchangeForm:
                    one = ranks.measure(block, x, form)
                    error = float((one.out.float() - expected.float()).norm() / expected.float().norm())
                    found = Found(
                        form.value, one.layer_us, one.exchange_us, one.moved.dispatched, one.moved.combined,
                        ideal.dispatched, ideal.combined, error,
                        imbalance_of(chosen, block), move_us, moved,
                    )  # fmt: skip
                    results.put((routing, num_tokens, found))


def rebalance(block: Moe, ranks: Ranks, wanted: Slots) -> tuple[float, int]:
    """Let ranks exchange experts. Return the microseconds it takes, and how many slots change."""
    assert block.slots is not None, "it has a placement"
    before, size = block.slots.placement, block.rule.expert_ranks
    slots = with_fewest_moves(wanted, before, size)
    return ranks.move(block, slots), len(moves_between(before, slots, size))


def figures_of(routing: str, num_tokens: int, found: Sequence[Found], options: argparse.Namespace) -> dict[str, Any]:
    """Return figures over all ranks: the slowest rank's times, the sum of bytes."""
    total = {name: sum(getattr(each, name) for each in found) for name in Found.__annotations__ if "bytes" in name}
    names = ("layer_us", "exchange_us", *(("move_us", "moved") if found[0].moved else ()))
    times = {name: round(max(getattr(each, name) for each in found), 2) for name in names}
    return {
        "device": options.device, "ranks": options.ranks, "routing": routing, "tokens": num_tokens,
        "placement": options.placement, "redundant": options.redundant, "imbalance": round(found[0].imbalance, 3),
        "form": found[0].form, **times, **total, "error": float(f"{max(each.error for each in found):.2g}"),
    }  # fmt: skip


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--tokens", type=int_list, default=[64, 1024], help="of all ranks")
    parser.add_argument("--hidden", type=int, default=2048)
    parser.add_argument("--inner", type=int, default=768, help="intermediate size of an expert")
    parser.add_argument("--experts", type=int, default=16)
    parser.add_argument("--top-k", type=int, default=2, help="experts of a token")
    parser.add_argument("--dtype", default="", choices=("", *DTYPES), help="float32 on a CPU, else bfloat16")
    parser.add_argument("--routing", type=lambda text: text.split(","), default=list(ROUTINGS))
    parser.add_argument("--placement", default="plain", choices=("plain", "balanced", "rebalanced"),
                        help="of experts on ranks")  # fmt: skip
    parser.add_argument("--redundant", type=int, default=0, help="slots for replicas of the hottest, all ranks'")
    parser.add_argument("--seconds", type=float, default=1.0, help="of a measurement on CPUs")
    add_cpu_time_argument(parser)
    parser.add_argument("--json", action="store_true", help="lines of JSON")
    options = parser.parse_args(arguments)
    options.dtype = options.dtype or ("float32" if options.device == "cpu" else "bfloat16")
    if options.ranks < 2 or options.experts % options.ranks or any(n % options.ranks for n in options.tokens):
        parser.error("--experts and --tokens must be multiples of --ranks, and those 2 or more")
    if options.redundant and options.placement == "plain":
        parser.error("--redundant: a plain placement has no replicas")
    if options.redundant % options.ranks or not 0 <= options.redundant <= options.experts * (options.ranks - 1):
        parser.error("--redundant must be a multiple of --ranks, and no rank have an expert twice")
    if not set(options.routing) <= set(ROUTINGS):
        parser.error(f"--routing: choose of {', '.join(ROUTINGS)}")
    return options


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse(arguments)
    context = torch.multiprocessing.get_context("fork")
    results, links = context.Queue(), [socket.socketpair() for _ in range(options.ranks)]
    with tempfile.TemporaryDirectory() as folder:
        processes = [
            context.Process(
                target=run_rank,
                args=(Shard(rank, options.ranks), folder, links[rank][1], results, options),
                daemon=True,
            )
            for rank in range(options.ranks)
        ]
        for process in processes:
            process.start()
        if options.device == "cuda":
            share_fds([mine for mine, _ in links])
        status = print_results(results, options, processes)
        for process in processes:
            if status and process.is_alive():
                process.terminate()  # it may wait for a rank that has ended
            process.join()
    for link in (link for pair in links for link in pair):
        link.close()
    return max([status, *(abs(process.exitcode or 0) for process in processes)])


def print_results(results: Any, options: argparse.Namespace, processes: Sequence[Any]) -> int:
    """Print a line for each form once all ranks have it. Return 1 if an output was wrong or a rank ended."""
    status, padded_us = 0, 0.0
    came: dict[tuple[str, int, str], list[Found]] = {}
    for _ in range(len(options.routing) * len(options.tokens) * len(ExchangeForm) * len(processes)):
        result = next_result(results, processes)
        if result is None:
            return 1
        routing, num_tokens, found = result
        of_ranks = came.setdefault((routing, num_tokens, found.form), [])
        of_ranks.append(found)
        if len(of_ranks) < len(processes):
            continue
        figures = figures_of(routing, num_tokens, of_ranks, options)
        if found.form == ExchangeForm.PADDED.value:  # the first form
            padded_us = figures["layer_us"]
        figures["against_padded"] = round(padded_us / figures["layer_us"], 2)
        report(figures, options.json)
        if not figures["error"] <= TOLERANCE[DTYPES[options.dtype]]:
            print(f"wrong: {figures['error']} from one rank", file=sys.stderr)
            status = 1
    return status


def next_result(results: Any, processes: Sequence[Any]) -> tuple[str, int, Found] | None:
    """Return the next result; None if a rank has ended with an error."""
    while True:
        try:
            result: tuple[str, int, Found] = results.get(timeout=1.0)
            return result
        except queue.Empty:
            if any(process.exitcode for process in processes):
                return None


if __name__ == "__main__":
    sys.exit(main())
