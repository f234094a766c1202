"""Divisions of GPUs into workers that do both phases, or into prefill and decode workers, with some TP. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from cli.simulation.settings import ClusterConfig

DEGREES = (1, 2, 4, 8)


@dataclass(frozen=True)
class Division:
    """kind: aggregated, static or adaptive. tp: GPUs of each worker. The name shows prefill and decode workers."""

    kind: str
    num_prefill: int
    num_decode: int
    prefill_tp: int = 1
    decode_tp: int = 1

    @property
    def name(self) -> str:
        decode = _named(self.num_decode, self.decode_tp)
        if self.kind == "aggregated":
            return f"{decode} for both"
        both = f"{_named(self.num_prefill, self.prefill_tp)} + {decode}"
        return f"{both} adaptive" if self.kind == "adaptive" else both


def _named(count: int, ranks: int) -> str:
    return f"{count}" if ranks == 1 else f"{count}xTP{ranks}"


@dataclass(frozen=True)
class WorkerCosts:
    """Step costs and KV blocks of a worker with some number of ranks."""

    steps: str
    num_gpu_blocks: int


def divisions(num_gpus: int, adaptive: bool, degrees: Sequence[int] = (1,)) -> list[Division]:
    """Return all divisions that use every GPU. degrees: possible numbers of ranks, independent for each role."""
    kinds = ("static", "adaptive") if adaptive else ("static",)
    found = [Division("aggregated", 0, num_gpus // tp, tp, tp) for tp in degrees if num_gpus % tp == 0]
    for prefill_tp in degrees:
        for decode_tp in degrees:
            for num_prefill in range(1, num_gpus // prefill_tp + 1):
                num_decode, left = divmod(num_gpus - num_prefill * prefill_tp, decode_tp)
                if num_decode and not left:
                    found += [Division(kind, num_prefill, num_decode, prefill_tp, decode_tp) for kind in kinds]
    return found


def cluster_of(division: Division, cluster: ClusterConfig, costs: Mapping[int, WorkerCosts]) -> ClusterConfig:
    """Return the settings with the division's workers. costs: by number of ranks; empty: all workers are alike."""
    made = replace(cluster, prefill_workers=division.num_prefill, decode_workers=division.num_decode)
    if not costs:
        return made
    prefill, decode = costs[division.prefill_tp], costs[division.decode_tp]
    return replace(
        made, steps=decode.steps, num_gpu_blocks=decode.num_gpu_blocks,
        prefill_steps=prefill.steps, prefill_num_gpu_blocks=prefill.num_gpu_blocks,
    )  # fmt: skip
