"""The tables of docs/benchmarks.md for one GPU: `benchmarks.engine` for several models and modes, one row each.

    python -m benchmarks.reports.gpu_table --rows qwen2.5-7b,qwen3-0.6b,qwen2.5-7b:fp8,qwen2.5-7b:w8a8 --out DIR

A row is a folder of benchmarks/configs, with its `--quant-mode` after a colon. Every row runs in a separate process,
with random weights. Other flags are passed to `benchmarks.engine`, whose figures are kept in DIR/ROW.jsonl.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

BATCHES = (1, 8, 64, 256)
PROMPTS = (2048, 8192, 16384)
CONFIGS = Path(__file__).parents[1] / "configs"
Figures = Mapping[str, Any]


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Speed of several models on one GPU, as a table.")
    parser.add_argument("--rows", required=True, help="model or model:mode, separated by commas")
    parser.add_argument("--out", default="", help="folder for all figures")
    options, rest = parser.parse_known_args(argv)
    print(header(), flush=True)
    failed = False
    for row in options.rows.split(","):
        figures = measure(row, rest)
        failed = failed or not figures
        print(table_row(row, figures), flush=True)
        if options.out:
            text = "".join(json.dumps(each) + "\n" for each in figures)
            (Path(options.out) / f"{row.replace(':', '-')}.jsonl").write_text(text)
    return int(failed)


def measure(row: str, flags: Sequence[str]) -> list[Figures]:
    """Return the output of `benchmarks.engine` for one row; partial output if it failed."""
    model, _, mode = row.partition(":")
    command = [
        sys.executable, "-m", "benchmarks.engine", "--model", str(CONFIGS / model), "--load-format", "dummy",
        "--quant-mode", mode or "none", "--batch", ",".join(map(str, BATCHES)),
        "--prefill", ",".join(map(str, PROMPTS)), "--offline256", "--json", *flags,
    ]  # fmt: skip
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)  # errors are shown as they occur
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]


def header() -> str:
    names = ["model", *map(str, BATCHES), f"{BATCHES[-1]} while all run", "prefill, ms", "offline256", "of the floor"]
    return f"| {' | '.join(names)} |\n|{'---|' * len(names)}"


def table_row(row: str, figures: Sequence[Figures]) -> str:
    """Return one line of Markdown; a dash for what was not measured."""
    by_batch = {each["batch"]: each for each in figures if "batch" in each}
    by_prompt = {each["prefill"]: each for each in figures if "prefill" in each}
    offline = [f"{each['tok_s']:,.0f}" for each in figures if "offline" in each]
    cells = [row]
    cells += [f"{by_batch[batch]['tok_s']:,.0f}" if batch in by_batch else "-" for batch in BATCHES]
    largest = by_batch.get(BATCHES[-1])
    cells.append(f"{largest['full_batch_tok_s']:,.0f}" if largest else "-")
    cells.append(" / ".join(f"{by_prompt[n]['prefill_s'] * 1e3:.1f}" if n in by_prompt else "-" for n in PROMPTS))
    cells.append(", ".join(offline) or "-")
    cells.append(" / ".join(f"{by_batch[n]['fraction_of_floor']:.0%}" if n in by_batch else "-" for n in BATCHES))
    return f"| {' | '.join(cells)} |"


if __name__ == "__main__":
    sys.exit(main())
