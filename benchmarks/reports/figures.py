"""The figure page: docs/figures.md and its pictures, from JSON lines in docs/data that benchmarks printed.

    make figures        (or python -m benchmarks.reports.figures; needs matplotlib)

Nothing is measured here. A chart without data appears on the page with the command that measures it.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

Lines = Sequence[Mapping[str, Any]]
DOCS = Path(__file__).parents[2] / "docs"


@dataclass(frozen=True)
class Chart:
    """One picture. `data` is the name of its JSON lines; `draw` fills the axes, `cells` the table below it."""

    data: str
    title: str
    command: str
    draw: Callable[[Any, Lines], None]
    header: Sequence[str]
    cells: Callable[[Mapping[str, Any]], Sequence[object]]


def spread(lines: Lines, name: str) -> Sequence[Sequence[float]]:
    """Return the distances from each figure down to its slowest run and up to its fastest; 0 for a single run."""
    below = [line[name] - line.get(f"{name}_min", line[name]) for line in lines]
    return below, [line.get(f"{name}_max", line[name]) - line[name] for line in lines]


def draw_throughput(axes: Any, lines: Lines) -> None:
    names, values = [line["step"] for line in lines], [line["tok_s"] for line in lines]
    bars = axes.barh(names, values, color="tab:blue", xerr=spread(lines, "tok_s"), capsize=3)
    axes.bar_label(bars, [f"{value:,.0f}" for value in values], padding=3)
    axes.invert_yaxis()
    axes.set(xlabel="output tokens per second", xlim=(0, 1.15 * max(values)))


def draw_graphs(axes: Any, lines: Lines) -> None:
    for step in dict.fromkeys(line["step"] for line in lines):
        own = [line for line in lines if line["step"] == step]
        axes.errorbar(
            [line["batch"] for line in own], [line["tok_s"] for line in own], spread(own, "tok_s"),
            marker="o", capsize=3, label=step,
        )  # fmt: skip
    batches = sorted({line["batch"] for line in lines})
    axes.set(xlabel="sequences in a step", ylabel="output tokens per second", yscale="log")
    axes.set_xscale("log", base=2)
    axes.set_xticks(batches, list(map(str, batches)))
    axes.legend()


def draw_experts(axes: Any, lines: Lines) -> None:
    groups = list(dict.fromkeys((line["routing"], line["tokens"]) for line in lines))
    forms = list(dict.fromkeys(line["form"] for line in lines))
    for index, form in enumerate(forms):
        own = {(line["routing"], line["tokens"]): line["layer_us"] for line in lines if line["form"] == form}
        xs = [at + 0.8 * (index + 0.5) / len(forms) - 0.4 for at in range(len(groups))]
        bars = axes.bar(xs, [own[group] for group in groups], 0.75 / len(forms), label=form)
        axes.bar_label(bars, fmt="{:,.0f}", padding=2, fontsize=8)
    axes.set_xticks(range(len(groups)), [f"{tokens} tokens, {routing}" for routing, tokens in groups])
    axes.set(ylabel="one layer (us)", yscale="log")
    axes.legend()


def draw_split_kv(axes: Any, lines: Lines) -> None:
    lengths = [int(line["shape"].rpartition("x")[2]) for line in lines]
    axes.plot(lengths, [line["unsplit_us"] for line in lines], marker="o", label="one program a KV head")
    axes.plot(lengths, [line["us"] for line in lines], marker="o", label="KV split among programs")
    axes.set(xlabel="tokens of KV", ylabel="attention of one sequence (us)", yscale="log")
    axes.set_xscale("log", base=2)
    axes.legend()


def draw_engines(axes: Any, lines: Lines) -> None:
    rows = list(dict.fromkeys(line["row"] for line in lines))
    batches = sorted({line["batch"] for line in lines if "batch" in line})
    speeds = {(line["row"], line["batch"], line["engine"]): line["tok_s"] for line in lines if "batch" in line}
    for index, batch in enumerate(batches):
        ratios = [speeds[row, batch, "mini-infer"] / speeds[row, batch, "vLLM"] for row in rows]
        xs = [at + 0.8 * (index + 0.5) / len(batches) - 0.4 for at in range(len(rows))]
        bars = axes.bar(xs, ratios, 0.75 / len(batches), label=f"{batch} sequences")
        axes.bar_label(bars, fmt="{:.2f}", padding=2, fontsize=8)
    axes.axhline(1.0, color="black", linewidth=1)
    axes.set_xticks(range(len(rows)), rows)
    axes.set(ylabel="output tok/s, mini-infer over vLLM")
    axes.legend()


def engine_cells(line: Mapping[str, Any]) -> Sequence[object]:
    shape = f"{line['batch']} sequences" if "batch" in line else f"one prompt of {line['prefill']:,} tokens"
    speed = f"{line['tok_s']:,.0f}" if "tok_s" in line else ""
    return line["row"], line["engine"], shape, speed, f"{line['prefill_s'] * 1e3:,.0f}"


def throughput_cells(line: Mapping[str, Any]) -> Sequence[object]:
    return line["step"], line["batch"], f"{line['tok_s']:,.0f}", range_of(line), f"{line['fraction_of_floor']:.0%}"


def range_of(line: Mapping[str, Any]) -> str:
    return f"{line['tok_s_min']:,.0f} to {line['tok_s_max']:,.0f}" if "rounds" in line else "one run"


THROUGHPUT_HEADER = "switched on", "requests at a time", "output tok/s: median", "of three runs", "share of the floor"
CHARTS = (
    Chart(
        "throughput", "Throughput by optimization",
        "python -m benchmarks.comparisons.ablations --model benchmarks/configs/qwen2.5-7b "
        "--load-format dummy --out docs/data",
        draw_throughput, THROUGHPUT_HEADER, throughput_cells,
    ),
    Chart(
        "throughput_cpu", "Throughput by optimization, on a CPU",
        "python -m benchmarks.comparisons.ablations --device cpu --batch 8 --input 128 --output 64 --out docs/data",
        draw_throughput, THROUGHPUT_HEADER, throughput_cells,
    ),
    Chart(
        "compare_vllm", "mini-infer and vLLM 0.26.0 on one H200",
        "python -m benchmarks.comparisons.compare_vllm "
        "--rows qwen2.5-7b,qwen2.5-7b:fp8,gemma3-4b,gpt-oss-20b "
        "--rounds 1 --turns 1 --out docs/data/compare_vllm.jsonl",
        draw_engines, ("model", "engine", "1,024 tokens in, 128 out", "output tok/s", "prompts (ms)"), engine_cells,
    ),
    Chart(
        "cuda_graphs", "Decode steps with and without CUDA graphs",
        "python -m benchmarks.comparisons.ablations --series cuda_graphs --model benchmarks/configs/qwen3-0.6b "
        "--load-format dummy --out docs/data",
        draw_graphs, ("step", "sequences", "ms", "output tok/s: median", "of three runs"),
        lambda line: (line["step"], line["batch"], line["tpot_ms"], f"{line['tok_s']:,.0f}", range_of(line)),
    ),
    Chart(
        "expert_parallel", "Expert parallelism: padded, packed, grouped",
        "python -m benchmarks.experts.parallel --device cuda --ranks 2 --tokens 64,128,1024 --json "
        "> docs/data/expert_parallel.jsonl",
        draw_experts, ("routing", "tokens", "form", "layer (us)", "bytes moved", "bytes needed"),
        lambda line: (
            line["routing"], line["tokens"], line["form"], f"{line['layer_us']:,.1f}",
            f"{line['dispatched_bytes'] + line['combined_bytes']:,}",
            f"{line['ideal_dispatched_bytes'] + line['ideal_combined_bytes']:,}",
        ),
    ),
    Chart(
        "split_kv", "Attention of one long sequence: KV split among programs",
        "python -m benchmarks.kernels.attention.bench_paged_decode --model qwen2.5-7b "
        "--shapes 1x1024,1x2048,1x4096,1x8192,1x16384,1x32768 > docs/data/split_kv.jsonl",
        draw_split_kv, ("rows x tokens", "not split (us)", "split (us)", "share of the read bandwidth"),
        lambda line: (line["shape"].split()[-1], line["unsplit_us"], line["us"], f"{line['of_read']:.0%}"),
    ),
)  # fmt: skip


def page(docs: Path) -> str:
    """Return the page, and write pictures to docs/img. Deterministic: the same JSON gives the same bytes."""
    parts = [
        "# Figures\n\nMade by `make figures` from the JSON in docs/data; nothing here is typed by hand. What stands "
        "beside other systems is in [benchmarks](benchmarks.md).\n"
    ]
    for chart in CHARTS:
        source = docs / "data" / f"{chart.data}.jsonl"
        parts.append(f"## {chart.title}\n")
        if source.exists():
            lines = [json.loads(line) for line in source.read_text(encoding="utf-8").splitlines()]
            draw(chart, lines, docs / "img" / f"{chart.data}.svg")
            machines = ", ".join(dict.fromkeys(line["machine"] for line in lines if "machine" in line))
            models = ", ".join(dict.fromkeys(line["model"] for line in lines if "model" in line))
            parts.append(f"{models + ', ' if models else ''}{machines}.\n\n![{chart.title}](img/{chart.data}.svg)\n")
            parts.append(table(chart.header, [chart.cells(line) for line in lines]))
        else:
            parts.append("Not measured yet.\n")
        parts.append(f"    {chart.command}\n")
    return "\n".join(parts)


def table(header: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    text = [header, ["---"] * len(header), *rows]
    return "".join("| " + " | ".join(map(str, row)) + " |\n" for row in text)


def draw(chart: Chart, lines: Lines, path: Path) -> None:
    import matplotlib
    from matplotlib.figure import Figure

    with matplotlib.rc_context({"svg.hashsalt": chart.data, "svg.fonttype": "none"}):
        figure: Any = Figure(figsize=(9, 4), layout="constrained")
        axes = figure.subplots()
        chart.draw(axes, lines)
        axes.grid(alpha=0.3)
        axes.set_axisbelow(True)
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, metadata={"Date": None, "Creator": None})


def main() -> int:
    (DOCS / "figures.md").write_text(page(DOCS), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
