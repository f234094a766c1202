"""`mini-infer demo --compare [NAME]`: measures comparisons on this machine and shows each as soon as it is there.

What needs a wing or hardware that is not here is left out, with the reason.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

from rich.console import Console

from cli.cluster.gpus import find_gpus, uses_gpu
from cli.comparisons.recording import Recording
from cli.comparisons.result import Comparison, shown
from common.model_files import DRY_RUN_MODEL_NAME
from common.wings import has_wing

ALL = "all"
ON_ENGINES = ("batching", "prefix-cache", "chunked-prefill", "quantization", "speculation", "cuda-graphs")
NAMES = (*ON_ENGINES, "disaggregation")
WINGS = {"quantization": "engine.quantization", "speculation": "engine.speculation"}


def compare(name: str, model: str, console: Console, picture: Path | None = None) -> None:
    """Measure the comparison of that name, or all of them, and draw the picture of it if there is to be one.

    Raises ConfigError for a model that cannot be loaded.
    """
    recording = Recording()
    for each in NAMES if name == ALL else (name,):
        if reason := _missing(each):
            console.print(f"\n{each}: left out, {reason}", style="bright_black")
            continue
        with console.status(f"measuring {each} ..."):
            comparison = _measured(each, model)
        console.print(shown(comparison))
        recording.add(shown(comparison))
    if picture is not None:
        flags = f" {name}" if name != ALL else ""
        picture.write_text(recording.svg(f"mini-infer demo --compare{flags}"))


def _missing(name: str) -> str:
    """Why this installation or this machine cannot show it; empty: it can."""
    needed = [WINGS.get(name, "cli"), *(["engine.offline"] if name in ON_ENGINES else [])]
    if not all(map(has_wing, needed)):
        return "this installation lacks what it compares"
    if name == "cuda-graphs" and not uses_gpu("auto"):
        return "there is no GPU"
    if name == "disaggregation" and uses_gpu("auto") and len(find_gpus("auto", os.environ).names) < 2:
        return "two workers need two GPUs"
    return ""


def _measured(name: str, model: str) -> Comparison:
    if name == "disaggregation":
        from cli.comparisons.on_clusters import disaggregation

        flags = ("--dry-run",) if model == DRY_RUN_MODEL_NAME else ("--model", model) if model else ()
        return disaggregation(flags)
    from cli.comparisons import on_engines  # torch, which takes seconds

    measure: Callable[[str], Comparison] = getattr(on_engines, name.replace("-", "_"))
    return measure(model)
