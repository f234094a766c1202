"""Workers of a cluster on this machine's GPUs: their number, their ranks, and their GPUs."""

from __future__ import annotations

import argparse
import dataclasses
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from cli.cluster.plan import ClusterConfig, LocalWorker, ServeConfig
from cli.gpus.placement import choose_workers, place, uses_gpu
from cli.gpus.serve_settings import RankSettings
from common.config import ENV_PREFIX
from common.errors import ConfigError
from common.model_files import ModelFiles
from common.wings import from_wing
from engine.config import EngineConfig


def engine_settings_of_ep(serve: ServeConfig, namespace: argparse.Namespace) -> dict[str, Any]:
    """Return the engine settings that --ep implies. Raises ConfigError if --tp differs."""
    ep = serve.of(RankSettings).ep
    if ep == 1:
        return {}
    if getattr(namespace, "tp", ep) != ep:
        raise ConfigError(f"--ep {ep} --tp {namespace.tp}: both are the ranks of a worker; give one")
    return {"tp": ep, "expert_parallel": True}


def fit_to_gpus(
    serve: ServeConfig,
    engine: EngineConfig,
    gpus: Sequence[str],
    namespace: argparse.Namespace,
    env: Mapping[str, str],
) -> tuple[ServeConfig, EngineConfig, str]:
    """Fill in the numbers of workers and ranks that are not given; also return why."""
    if not gpus:
        return serve, engine, ""
    reasons = []
    is_tp_given = serve.of(RankSettings).ep > 1 or hasattr(namespace, "tp") or f"{ENV_PREFIX}TP" in env
    if not is_tp_given and engine.pp == 1 and (choose_tp := from_wing("cli.sizing.ranks:choose_tp")):
        tp, reason = choose_tp(engine, len(gpus))
        engine = dataclasses.replace(engine, tp=tp)
        reasons.append(reason)
    prefill, decode, reason = choose_workers(serve.prefill, serve.decode, engine.num_ranks, len(gpus))
    serve = dataclasses.replace(serve, prefill=prefill, decode=decode)
    return serve, engine, "; ".join(filter(None, [*reasons, reason]))


def placed(workers: Sequence[LocalWorker], serve: ServeConfig, gpus: Sequence[str]) -> list[LocalWorker]:
    """Return the workers with their ranks and GPUs. Workers on one GPU share `--gpu-memory-fraction` equally.

    Raises ConfigError.
    """
    if prefill_tp := serve.of(RankSettings).prefill_tp:
        engine = dataclasses.replace(workers[0].engine, tp=prefill_tp)
        workers = [dataclasses.replace(each, engine=engine) if each.role == "prefill" else each for each in workers]
    if not gpus:
        return [*workers]
    sizes = [(worker.engine.pp, worker.engine.tp) for worker in workers]
    for pp, tp in sizes:
        if pp * tp > len(gpus):
            flags = [f"--{name} {size}" for name, size in (("pp", pp), ("tp", tp)) if size > 1]
            raise ConfigError(f"{' '.join(flags)}: there are {len(gpus)} GPUs")
    found = []
    for worker, placement in zip(workers, place(gpus, [pp * tp for pp, tp in sizes]), strict=True):
        fraction = round(worker.gpu.gpu_memory_fraction / placement.num_sharing, 4)
        gpu = dataclasses.replace(worker.gpu, gpu_memory_fraction=fraction)
        found.append(dataclasses.replace(worker, gpu=gpu, gpus=placement.gpus, visible=placement.visible))
    return found


def check_placement(config: ClusterConfig, model: ModelFiles, argv: Sequence[str]) -> list[str]:
    """Check the model before workers start. Returns the lines about GPUs that `serve` prints. Raises ConfigError."""
    check_ranks(config, model)
    if "--use-cuda-graph" in argv and not uses_gpu(config.engine.device):
        print("note: --use-cuda-graph has no effect on a CPU", file=sys.stderr)
    return placement_lines(config)


def check_ranks(config: ClusterConfig, model: ModelFiles) -> None:
    """Raise ConfigError if the model cannot be divided among the ranks of a worker."""
    engines = {worker.engine.num_ranks: worker.engine for worker in config.workers}
    if max(engines) > 1:
        from engine.loader.load import check_model  # imports torch, which takes a second

        for engine in engines.values():
            check_model(model, engine)


def placement_lines(config: ClusterConfig) -> list[str]:
    """Return lines about the GPUs of each worker and the number of workers; none on a CPU."""
    lines = [f"{worker.name} on GPU {', '.join(worker.gpus)}" for worker in config.workers if worker.gpus]
    if lines and config.why_these_workers:
        lines.append(f"{config.why_these_workers} (--prefill, --decode and --tp override)")
    return lines
