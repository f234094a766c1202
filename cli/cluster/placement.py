"""Which workers a machine's GPUs get by default, and which GPUs each worker takes. Pure.

On a CPU a prefill and a decode worker share the cores, as a laptop's way to try disaggregation. On GPUs every worker
does both: on one H200 two workers that share it take 154 ms instead of 51 to the first token and give 20 to 33% less
throughput, and on two a prefill worker beside a decode worker gave 5.6k tok/s where two that do both gave 8.6k.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from cli.cluster.gpus import Gpus

WEIGHT_SHARE = 0.6  # of a GPU's memory, at most: the rest is for KV and the largest step


@dataclass(frozen=True, slots=True)
class Workers:
    """How many there are of each role, on how many GPUs each, and why."""

    prefill: int
    decode: int
    tp: int
    reason: str = ""


@dataclass(frozen=True, slots=True)
class Placement:
    """One worker's GPUs. visible: these first, the others behind them, so that the worker can map their pools."""

    gpus: tuple[str, ...]
    visible: str
    num_sharing: int  # workers on its fullest GPU, itself counted


def choose_workers(prefill: int | None, decode: int | None, tp: int | None, gpus: Gpus, weight_bytes: int) -> Workers:
    """Fill in what is None. weight_bytes: of the model in memory; 0: not known."""
    num_gpus = len(gpus.names)
    if not num_gpus:
        return Workers(1 if prefill is None else prefill, 1 if decode is None else decode, tp or 1)
    reasons = []
    if tp is None:
        tp = fitting_tp(num_gpus, gpus.memory_bytes, weight_bytes)
        if tp > 1:
            weights, memory = (f"{size / 1e9:.0f} GB" for size in (weight_bytes, gpus.memory_bytes))
            reasons.append(f"--tp {tp}: weights of {weights} and KV do not fit a GPU of {memory}")
    if prefill is None:
        prefill = 0
        reasons.append("workers do both: prefill and decode workers of their own pay when prompts disturb streams")
    if decode is None:
        decode = max(num_gpus // tp - prefill, 1)
    return Workers(prefill, decode, tp, "; ".join(reasons))


def fitting_tp(num_gpus: int, memory_bytes: int, weight_bytes: int) -> int:
    """The fewest GPUs, a power of two, that hold the weights with room for KV; as many as there are when none do."""
    tp = 1
    while memory_bytes and weight_bytes > tp * memory_bytes * WEIGHT_SHARE and 2 * tp <= num_gpus:
        tp *= 2
    return tp


def place(gpus: Sequence[str], sizes: Sequence[int]) -> list[Placement]:
    """GPUs for workers of so many ranks each, in turn."""
    first, taken = 0, []
    for size in sizes:
        taken.append([(first + rank) % len(gpus) for rank in range(size)])
        first += size
    load = Counter(index for indices in taken for index in indices)
    placements = []
    for indices in taken:
        others = [index for index in range(len(gpus)) if index not in indices]
        visible = ",".join(gpus[index] for index in [*indices, *others])
        own = tuple(gpus[index] for index in indices)
        placements.append(Placement(own, visible, max(load[index] for index in indices)))
    return placements
