"""Profile of a decode step on a GPU: kernels by name, CUDA runtime calls, host time by phase.

    python -m benchmarks.profile.decode_profile --model DIR --load-format dummy --batch 1,64 --steps 20 --out DIR

Figures are per step, in microseconds. Kernels of a step overlap: what each adds to the step is the time from the end
of the previous kernel to its own end; its duration, during which it may wait for others, follows. Kernels with the
same name are separated by grid. Since the profiler slows the host down, host phases are timed before, without it.
`--out` keeps the events of three steps as `decode_BATCH.json`, which `benchmarks.profile.decode_picture` draws.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from benchmarks.engine import Bench, open_bench, parse
from benchmarks.harness import drain, prefill
from engine.scheduling.scheduler import Scheduler

NAME_LENGTH = 60
KEPT_STEPS = 3


def main() -> int:
    own = argparse.ArgumentParser(add_help=False)
    own.add_argument("--steps", type=int, default=20, help="steps that are profiled")
    own.add_argument("--out", default="", help="folder for the events")
    own.add_argument("--top", type=int, default=16, help="kernels shown")
    options, rest = own.parse_known_args()
    engine_options = parse(rest)
    bench = open_bench(engine_options)
    for batch in engine_options.batch:
        requests = [bench.add(engine_options.input, 4 * options.steps + 64) for _ in range(batch)]
        step = bench.parts.engine.step
        prefill(bench.parts.engine, requests, 8)
        host = host_phases(bench, 2 * options.steps)
        events, span = profiled(step, options.steps)
        show(batch, host, events, span, options.steps, options.top)
        if options.out:
            keep(Path(options.out) / f"decode_{batch}.json", events, span / options.steps)
        for request in requests:
            bench.parts.engine.abort(request.request_id)
        drain(bench.parts.engine)
    return 0


def host_phases(bench: Bench, steps: int) -> dict[str, float]:
    """Return the microseconds per step that the host spends in each phase, and in the whole step."""
    runner = bench.parts.runner
    seconds: dict[str, float] = defaultdict(float)

    def timed(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            began = time.perf_counter()
            try:
                return function(*args)
            finally:
                seconds[name] += time.perf_counter() - began

        return call

    def launch(plan: Any) -> Any:
        step = plain_launch(plan)
        return SimpleNamespace(result=timed("wait", step.result))

    plain_launch = runner.launch
    phases = {name: getattr(Scheduler, name) for name in ("schedule", "advance", "update")}
    for name, function in phases.items():
        setattr(Scheduler, name, timed(name, function))
    runner.launch = timed("launch", launch)
    began = time.perf_counter()
    for _ in range(steps):
        bench.parts.engine.step()
    total = time.perf_counter() - began
    for name, function in phases.items():
        setattr(Scheduler, name, function)
    del runner.launch
    return {name: value / steps * 1e6 for name, value in {**seconds, "step": total}.items()}


def profiled(step: Callable[[], object], steps: int) -> tuple[list[dict[str, Any]], float]:
    """Return the complete events of a chrome trace, and the span of the device's work in microseconds."""
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profile:
        for _ in range(steps):
            step()
        torch.cuda.synchronize()
    with tempfile.NamedTemporaryFile(suffix=".json") as file:
        profile.export_chrome_trace(file.name)
        trace = json.loads(Path(file.name).read_text())
    events = [event for event in trace["traceEvents"] if event.get("ph") == "X"]
    device = [event for event in events if is_device(event)]
    begin = min(event["ts"] for event in device)
    return events, max(event["ts"] + event["dur"] for event in device) - begin


def is_device(event: dict[str, Any]) -> bool:
    return event.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset")


def show(batch: int, host: dict[str, float], events: list[dict[str, Any]], span: float, steps: int, top: int) -> None:
    device = [event for event in events if is_device(event)]
    added = time_added(device)
    busy = sum(sum(each) for each, _ in added.values())
    print(f"batch {batch}: host " + "  ".join(f"{name} {value:.0f}" for name, value in host.items()))
    print(f"  device span {span / steps:.0f}  busy {busy / steps:.0f}  kernels {len(device) / steps:.0f}")
    for name, (each, durations) in sorted(added.items(), key=lambda item: -sum(item[1][0]))[:top]:
        total, count = sum(each) / steps, len(each) / steps
        print(f"  {total:8.1f}  {count:6.1f} x {total / count:7.2f} of {sum(durations) / len(each):7.2f}  {name}")
    calls: dict[str, int] = defaultdict(int)
    for event in events:
        if event.get("cat") in ("cuda_runtime", "cuda_driver"):
            calls[event["name"]] += 1
    print("  calls " + "  ".join(f"{name} {count / steps:.1f}" for name, count in sorted(calls.items())))
    sys.stdout.flush()


def time_added(device: Sequence[Mapping[str, Any]]) -> dict[str, tuple[list[float], list[float]]]:
    """Return for each name and grid, by launch: microseconds added after earlier ones, without gaps; durations."""
    found: dict[str, tuple[list[float], list[float]]] = defaultdict(lambda: ([], []))
    end = 0.0
    for event in sorted(device, key=lambda event: event["ts"] + event["dur"]):
        grid = event.get("args", {}).get("grid", "")
        added, durations = found[f"{event['name'][:NAME_LENGTH]} {grid}".rstrip()]
        own_end = event["ts"] + event["dur"]
        added.append(own_end - max(event["ts"], end))
        durations.append(event["dur"])
        end = own_end
    return found


def keep(path: Path, events: list[dict[str, Any]], step: float) -> None:
    """Keep events of a few steps in the middle: [kind, name, start, duration] in microseconds."""
    device = sorted(event["ts"] for event in events if is_device(event))
    begin = device[len(device) // 2]
    chosen = [
        [event["cat"], event["name"][:NAME_LENGTH], round(event["ts"] - begin, 2), round(event["dur"], 2)]
        for event in events
        if begin <= event["ts"] < begin + KEPT_STEPS * step
        and (is_device(event) or event.get("cat") in ("cuda_runtime", "cuda_driver"))
    ]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"step_us": step, "events": chosen}))


if __name__ == "__main__":
    sys.exit(main())
