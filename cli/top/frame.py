"""One frame of `mini-infer top`, from the router's facts and the figures of a second. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Group, RenderableType
from rich.markup import escape
from rich.table import Table
from rich.text import Text

BAR_WIDTH, JOURNEY_WIDTH = 20, 40
STATES = {"ready": "green", "draining": "yellow", "suspended": "yellow", "connecting": "yellow"}
PHASES = {
    "route": ("router", "bright_black"), "queue": ("queue", "bright_black"), "prefill": ("prefill", "blue"),
    "pull": ("KV pull", "cyan"), "decode": ("decode", "bright_blue"), "wait": ("wait", "yellow"),
    "replay": ("replay", "bright_yellow"),
}  # fmt: skip


def frame(facts: Mapping[str, Any], now: Mapping[str, Any]) -> RenderableType:
    rows = [dict(zip(facts["columns"], row, strict=True)) for row in now["workers"]]
    router = facts["router"]
    running = sum(counts[0] for counts in now["models"].values())
    waiting = sum(counts[1] for counts in now["models"].values())
    pulled = sum(pull["tokens"] for pull in now["pulls"])
    head = (
        f"[bold]{escape(', '.join(facts['models']))}[/]  router {escape(router['host'])}, process {router['pid']}, "
        f"policy {escape(router['policy'])}\n"
        f"{running} running, {waiting} waiting, {sum(row['decode_rate'] for row in rows):,.0f} output tokens/s, "
        f"{sum(row['prefill_rate'] for row in rows):,.0f} prompt tokens/s, "
        f"{len(now['pulls'])} KV transfers ({pulled:,} tokens)"
    )
    parts: list[RenderableType] = [Text.from_markup(head), workers_table(facts["workers"], rows)]
    if now["requests"]:
        parts += [journeys_table(now["requests"]), legend()]
    return Group(*parts)


def workers_table(workers: Sequence[Mapping[str, Any]], rows: Sequence[Mapping[str, Any]]) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bright_black")
    for name in ("worker", "host", "device", "state", "KV"):
        table.add_column(name, no_wrap=True)
    for name in ("used", "run", "wait", "leases", "step", "tokens/s"):
        table.add_column(name, justify="right", no_wrap=True)
    for worker, row in zip(workers, rows, strict=True):
        used = row["blocks"] - row["free"] - row["cached"]
        share, cached = (used / row["blocks"], row["cached"] / row["blocks"]) if row["blocks"] else (0.0, 0.0)
        rate = row["prefill_rate"] if worker["role"] == "prefill" else row["decode_rate"]
        table.add_row(
            Text(worker["id"]),
            Text(worker["host"]),
            Text(worker.get("device", "")),
            Text(row["state"].replace("_", " "), style=STATES.get(row["state"], "red")),
            kv_bar(share, cached),
            f"{share:.0%}",
            str(row["running"]),
            str(row["waiting"] + row["loading"]),
            str(row["leases"]),
            seconds_text(row["step_ms"] / 1e3) if row["step_ms"] else "-",
            f"{rate:,.0f}",
        )
    return table


def kv_bar(used: float, cached: float) -> Text:
    """Draw blocks in use, then blocks held only by the prefix cache, then free ones."""
    num_used = round(used * BAR_WIDTH)
    num_cached = round((used + cached) * BAR_WIDTH) - num_used
    bar = Text("█" * num_used, style="blue")
    return bar.append("▒" * num_cached, "blue").append("·" * (BAR_WIDTH - num_used - num_cached), "bright_black")


def journeys_table(requests: Sequence[Mapping[str, Any]]) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bright_black")
    table.add_column("request", no_wrap=True)
    table.add_column("prompt", justify="right")
    table.add_column("output", justify="right")
    table.add_column("time", no_wrap=True)
    table.add_column("total", justify="right", no_wrap=True)
    table.add_column("state", no_wrap=True)
    longest = max(request["total"] for request in requests)
    for request in requests:
        state = request["state"] + (", moved" if request["moves"] else "")
        table.add_row(
            Text(request["id"].partition("-")[2][:8]),
            str(request["prompt"]),
            str(request["output"]),
            journey_bar(request["spans"], longest),
            seconds_text(request["total"]),
            Text(state),
        )
    return table


def journey_bar(spans: Sequence[Sequence[Any]], longest: float) -> Text:
    """Draw each span's part of JOURNEY_WIDTH cells, which stand for `longest` seconds."""
    bar, end, cell = Text(), 0.0, 0
    for phase, _, seconds in spans:
        end += seconds
        stop = round(JOURNEY_WIDTH * end / longest) if longest else 0
        bar.append("█" * (stop - cell), PHASES[phase][1])
        cell = stop
    return bar


def legend() -> Text:
    text = Text()
    for name, style in PHASES.values():
        text.append("█ ", style).append(f"{name}  ", "bright_black")
    return text


def seconds_text(seconds: float) -> str:
    return f"{seconds * 1e3:.1f} ms" if seconds < 0.1 else f"{seconds:.2f} s"
