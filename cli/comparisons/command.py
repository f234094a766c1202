"""`mini-infer demo --compare [NAME]`: measures comparisons on this machine and shows each when it is done.

Comparisons that need a missing wing or missing hardware are left out, with the reason.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

from rich.console import Console

from cli.comparisons.recording import Recording
from cli.comparisons.result import Comparison, shown
from cli.gpus.placement import find_gpus, uses_gpu
from common.model_files import DRY_RUN_MODEL_NAME
from common.wings import has_wing

ALL = "all"
ON_ENGINES = ("batching", "prefix-cache", "chunked-prefill", "quantization", "speculation", "cuda-graphs")
NAMES = (*ON_ENGINES, "disaggregation")
WINGS = {"quantization": "engine.quantization", "speculation": "engine.speculation"}


def compare(name: str, model: str, console: Console, picture: Path | None = None) -> None:
    """Measure the comparison with that name, or all of them, and draw a picture if wanted.

    Raises ConfigError if the model cannot be loaded.
    """
    recording, num_threads = Recording(), free_cores(len(os.sched_getaffinity(0)), os.getloadavg()[0])
    if num_threads and name != "disaggregation":
        console.print(f"other programs keep cores busy: threads of each engine: {num_threads}", style="bright_black")
    for each in NAMES if name == ALL else (name,):
        if reason := _missing(each):
            console.print(f"\n{each}: left out, {reason}", style="bright_black")
            continue
        with console.status(f"measuring {each} ..."):
            comparison = _measured(each, model, num_threads)
        console.print(shown(comparison))
        recording.add(shown(comparison))
    if picture is not None:
        flags = f" {name}" if name != ALL else ""
        picture.write_text(recording.svg(f"mini-infer demo --compare{flags}"))


def free_cores(num_cores: int, load: float) -> int:
    """Return the threads for an engine if others keep `load` cores busy on average; 0: one per core, the default.

    Threads of one GEMM wait for the slowest: with one thread more than free cores, a step on a busy machine took more
    than ten times as long. Workers of a cluster do this themselves (`worker/cores`).
    """
    num_free = max(num_cores - round(load), 1)
    return num_free if num_free < num_cores else 0


def _missing(name: str) -> str:
    """Return why this installation or machine cannot run a comparison; empty: it can."""
    needed = [WINGS.get(name, "cli"), *(["engine.offline"] if name in ON_ENGINES else [])]
    if not all(map(has_wing, needed)):
        return "this installation lacks what it compares"
    if name == "cuda-graphs" and not uses_gpu("auto"):
        return "there is no GPU"
    if name == "disaggregation" and uses_gpu("auto") and len(find_gpus("auto")) < 2:
        return "two workers need two GPUs"
    return ""


def _measured(name: str, model: str, num_threads: int) -> Comparison:
    if name == "disaggregation":
        from cli.comparisons.on_clusters import disaggregation

        flags = ("--dry-run",) if model == DRY_RUN_MODEL_NAME else ("--model", model) if model else ()
        return disaggregation(flags)
    from cli.comparisons import on_engines  # imports torch, which takes seconds

    measure: Callable[[str, int], Comparison] = getattr(on_engines, name.replace("-", "_"))
    return measure(model, num_threads)
