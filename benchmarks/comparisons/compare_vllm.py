"""mini-infer and vLLM in turn on one machine, with the same shapes and random weights: output tok/s, first tokens.

    python -m benchmarks.comparisons.compare_vllm --rows qwen2.5-7b,qwen2.5-7b:fp8 --vllm-python VENV/bin/python

A row is a folder of benchmarks/configs, and after a colon its `--quant-mode`. vLLM needs another torch, so it runs
under an interpreter of its own (`vllm_engine.py`). Each engine runs --turns times a row, the second time in the other
order, in a process of its own; cells are medians, ours / vLLM's, and --out keeps every figure as JSON lines.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.harness import int_list

CONFIGS = Path(__file__).parents[1] / "configs"
VLLM_ENGINE = Path(__file__).with_name("vllm_engine.py")
ENGINES = ("mini-infer", "vLLM")
Figures = Mapping[str, Any]


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="mini-infer and vLLM on one GPU, as a table.")
    parser.add_argument("--rows", required=True, help="model or model:mode, separated by commas")
    parser.add_argument("--vllm-python", default=sys.executable, help="interpreter that has vLLM")
    parser.add_argument("--batch", type=int_list, default=[1, 8, 64, 256])
    parser.add_argument("--prefill", type=int_list, default=[8192], help="single prompts of these lengths")
    parser.add_argument("--input", type=int, default=1024)
    parser.add_argument("--output", type=int, default=128)
    parser.add_argument("--tp", type=int, default=1)
    parser.add_argument("--turns", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3, help="runs in a turn, after one more; the best counts")
    parser.add_argument("--out", default="", help="file for all figures")
    options, more = parser.parse_known_args(argv)  # only for mini-infer
    names = [*map(str, options.batch), *(f"{count} tokens, ms" for count in options.prefill)]
    print(f"| mini-infer / vLLM | {' | '.join(names)} |\n|{'---|' * (1 + len(names))}", flush=True)
    complete = True
    for row in options.rows.split(","):
        figures = []
        for each in (each for turn in range(options.turns) for each in run_turn(row, turn, options, more)):
            figures.append(each)
            if options.out:  # at once: a later engine may fail, or take too long
                with Path(options.out).open("a", encoding="utf-8") as file:
                    file.write(json.dumps({"row": row, **each}) + "\n")
        cells = [cell(figures, "batch", batch, "tok_s", 1) for batch in options.batch]
        cells += [cell(figures, "prefill", count, "prefill_s", 1e3) for count in options.prefill]
        print(f"| {row} | {' | '.join(cells)} |", flush=True)
        complete = complete and not any("-" in part for part in cells)
    return 0 if complete else 1


def run_turn(row: str, turn: int, options: argparse.Namespace, more: Sequence[str]) -> Iterator[Figures]:
    """Yield the figures of both engines, with `engine` and `turn`; if one fails, only what it has printed."""
    name, _, mode = row.partition(":")
    shapes = [
        f"--model={CONFIGS / name}", f"--quant-mode={mode or 'none'}", f"--input={options.input}",
        f"--output={options.output}", f"--batch={','.join(map(str, options.batch))}",
        f"--prefill={','.join(map(str, options.prefill))}", f"--tp={options.tp}", f"--rounds={options.rounds}",
    ]  # fmt: skip
    longest = max(options.input + options.output, *options.prefill, 0)
    commands = {
        "mini-infer": [
            sys.executable, "-m", "benchmarks.comparisons.mini_infer_engine", *shapes, "--load-format=dummy",
            f"--max-model-len={longest + 8}", *more,
        ],
        "vLLM": [options.vllm_python, str(VLLM_ENGINE), *shapes],
    }  # fmt: skip
    for engine in ENGINES[:: 1 if turn % 2 == 0 else -1]:
        with subprocess.Popen(commands[engine], stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            for line in process.stdout:
                if line.startswith("{"):
                    yield {"engine": engine, "turn": turn, **json.loads(line)}


def cell(figures: Sequence[Figures], shape: str, size: int, figure: str, unit: float) -> str:
    """Return the medians of both engines; a dash if not measured."""
    parts = []
    for engine in ENGINES:
        found = [each[figure] * unit for each in figures if each["engine"] == engine and each.get(shape) == size]
        parts.append(f"{statistics.median(found):,.0f}" if found else "-")
    return " / ".join(parts)


if __name__ == "__main__":
    sys.exit(main())
