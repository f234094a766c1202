"""Run sections of docs/gpu_runs.md, whose commands they are: what is still to be measured on GPUs.

    python -m benchmarks.reports.gpu_runs --list
    python -m benchmarks.reports.gpu_runs experts pipeline --out /tmp/runs
    python -m benchmarks.reports.gpu_runs dense --before ../before

Knows headings and code blocks, not what the figures mean. Output is shown as it comes and kept in OUT/SECTION-N.log.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs/gpu_runs.md"


@dataclass(frozen=True)
class Section:
    """One visit to a machine."""

    name: str
    num_gpus: int
    minutes: int
    commands: Sequence[str]


def sections(text: str) -> Iterator[Section]:
    """Yield the page's sections in order. A heading reads `## name (2 GPUs, 6 minutes)`."""
    for part in re.split(r"^## ", text, flags=re.MULTILINE)[1:]:
        heading = re.match(r"(\S+) \((\d+) GPUs?, (\d+) minutes?\)\n", part)
        if heading is None:
            raise ValueError(f"not a heading of a section: ## {part.splitlines()[0]}")
        commands = [
            line for block in re.findall(r"```bash\n(.*?)```", part, re.DOTALL) for line in block.splitlines()
        ]
        yield Section(heading[1], int(heading[2]), int(heading[3]), commands)


def main(argv: Sequence[str] | None = None) -> int:
    found = {section.name: section for section in sections(PAGE.read_text(encoding="utf-8"))}
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.reports.gpu_runs", description=__doc__.splitlines()[0]
    )
    parser.add_argument("names", nargs="*", choices=[[], *found], metavar="SECTION")
    parser.add_argument("--list", action="store_true", help="names, GPUs and minutes of the sections")
    parser.add_argument("--before", type=Path, help="another checkout, where each command runs first")
    parser.add_argument("--out", type=Path, help="folder for the output")
    options = parser.parse_args(argv)
    if options.list or not options.names:
        for section in found.values():
            gpus, commands = f"{section.num_gpus} x GPU", f"{len(section.commands)} commands"
            print(f"{section.name:<16} {gpus} {section.minutes:>3} min {commands:>11}")
        return 0
    if options.out:
        options.out.mkdir(parents=True, exist_ok=True)
    trees = {"before": options.before, "now": ROOT} if options.before else {"now": ROOT}
    failed = 0
    for name in options.names:
        for index, command in enumerate(found[name].commands, 1):
            for label, tree in trees.items():
                log = options.out / f"{name}-{index}-{label}.log" if options.out else None
                failed += run(command, tree, label, log) != 0
    return min(failed, 1)


def run(command: str, tree: Path, label: str, log: Path | None) -> int:
    """Run the command with this interpreter as `python`; return its status. Output goes to terminal and log."""
    print(f"# {label}: {command}", flush=True)
    begun = time.monotonic()
    words = [sys.executable if word == "python" else word for word in command.split()]
    with ExitStack() as stack:
        process = stack.enter_context(
            subprocess.Popen(words, cwd=tree, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        )
        kept = stack.enter_context(log.open("w", encoding="utf-8")) if log else None
        for line in process.stdout or ():
            print(line, end="", flush=True)
            if kept:
                kept.write(line)
    print(f"# {time.monotonic() - begun:.0f} s, exit {process.returncode}", flush=True)
    return process.returncode


if __name__ == "__main__":
    sys.exit(main())
