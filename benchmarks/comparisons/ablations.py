"""What each optimization is worth: `benchmarks.engine` with one more of them switched on from line to line.

    python -m benchmarks.comparisons.ablations --model benchmarks/configs/qwen2.5-7b --load-format dummy --out DIR
    python -m benchmarks.comparisons.ablations --series cuda_graphs --model benchmarks/configs/qwen3-0.6b ...

writes OUT/SERIES.jsonl (of a CPU OUT/SERIES_cpu.jsonl), which `make figures` draws. Every line is measured in a
process of its own. Flags that are not listed go to `benchmarks.engine` as they are.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

EAGER = ("--no-use-cuda-graph", "--no-overlap")
ROUNDS = 3  # the median is shown, with the slowest and the fastest run
GRAPH_BATCHES = "1,2,4,8,16,32,64,128,256"
# What is switched on, and the flags that leave out the later steps.
Steps = Sequence[tuple[str, Sequence[str]]]
GPU_STEPS: Steps = (
    ("one request at a time", ("--batch=1", "--quant-mode=none", *EAGER)),
    ("batching", ("--quant-mode=none", *EAGER)),
    ("CUDA graphs", ("--quant-mode=none", "--no-overlap")),
    ("overlapped steps", ("--quant-mode=none",)),
    ("fp8 weights", ("--quant-mode=fp8",)),
    ("fp8 KV cache", ("--quant-mode=fp8", "--kv-cache-dtype=fp8")),
)
GRAPH_STEPS: Steps = (("eager", EAGER), ("CUDA graphs", ("--no-overlap",)))
CPU_STEPS: Steps = (
    ("one request at a time", ("--batch=1", "--quant-mode=none")),
    ("batching", ("--quant-mode=none",)),
    ("int8 weights", ("--quant-mode=int8-weight",)),
    ("int4 weights", ("--quant-mode=int4-weight",)),
)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.comparisons.ablations", description=__doc__.splitlines()[0]
    )
    parser.add_argument("--series", choices=("throughput", "cuda_graphs"), default="throughput")
    parser.add_argument("--out", required=True, help="folder for the JSON")
    parser.add_argument("--batch", type=int, default=64, help="requests at the same time")
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    options, flags = parser.parse_known_args(argv)
    on_gpu = options.device == "cuda" or (options.device == "auto" and torch.cuda.is_available())
    if options.series == "cuda_graphs" and not on_gpu:
        parser.error("--series cuda_graphs needs a GPU")
    steps, batch = GPU_STEPS if on_gpu else CPU_STEPS, str(options.batch)
    if options.series == "cuda_graphs":
        steps, batch = GRAPH_STEPS, GRAPH_BATCHES
    series = options.series if on_gpu else f"{options.series}_cpu"
    path, lines = Path(options.out, f"{series}.jsonl"), []
    for name, step in steps:
        lines += measure(name, [f"--device={'cuda' if on_gpu else 'cpu'}", *flags, f"--batch={batch}", *step])
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    return 0


def measure(name: str, flags: Sequence[str]) -> list[dict[str, Any]]:
    """Return the figures of one line, one object for each batch size. Raises CalledProcessError."""
    command = [sys.executable, "-m", "benchmarks.engine", "--json", f"--rounds={ROUNDS}", *flags]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    found = [{"step": name, **json.loads(line)} for line in done.stdout.splitlines()]
    print(f"{name}: " + ", ".join(f"{each['batch']} {each['tok_s']} tok/s" for each in found), flush=True)
    return found


if __name__ == "__main__":
    sys.exit(main())
