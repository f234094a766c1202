"""`mini-infer explain ID`: where a request's time was spent, and which placements were considered."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from cli.top.frame import seconds_text
from cli.top.source import add_router_arguments, router_of
from common.config import SettingsParser


def build_parser() -> SettingsParser:
    parser = SettingsParser(
        prog="mini-infer explain", description="Show the decisions and the time line of a request."
    )
    parser.add_argument(
        "request_id", metavar="ID", help="of an answer: `id` in its JSON, or the x-mini-infer-id header"
    )
    add_router_arguments(parser)
    return parser


def run(argv: Sequence[str]) -> int:
    arguments = build_parser().parse_args(argv)
    with router_of(arguments) as router:
        found = router.get_json(f"/explain/{arguments.request_id}")
    console = Console()
    for choice in found["choices"]:
        console.print(explanation(found["model"], choice))
    return 0


def explanation(model: str, choice: Mapping[str, Any]) -> RenderableType:
    """Show one choice of a request, from the JSON of GET /explain."""
    head = Text.assemble(
        (choice["choice"], "bold"),
        f"  {model}, {choice['state']}: {choice['prompt_tokens']} prompt tokens ({choice['cached_tokens']} cached), "
        f"{choice['output_tokens']} output tokens, {choice['migrations']} migrations, {choice['moves']} moves",
    )
    parts: list[RenderableType] = [_time_line(choice), _legs(choice["workers"]), *map(_decision, choice["decisions"])]
    if choice.get("hindsight"):  # neither for an open answer, nor for one that moved
        parts.append(_hindsight(choice["hindsight"], choice["decisions"][0]["chosen"]))
    return Group(head, *parts)


def _table(*columns: str, title: str) -> Table:
    table = Table(title=title, title_justify="left", box=None, header_style="bright_black", pad_edge=False)
    for number, column in enumerate(columns):
        table.add_column(column, justify="right" if number else "left")
    return table


def _time_line(choice: Mapping[str, Any]) -> Table:
    table = _table("time line, from", "seconds", title="")
    for span in choice["time_line"]:
        table.add_row(Text(span["after"]), seconds_text(span["seconds"]))
    table.add_row(Text("total", style="bold"), seconds_text(choice["total_seconds"]))
    return table


def _legs(legs: Sequence[Mapping[str, Any]]) -> Table:
    table = _table("worker", "queue", "prompt", "KV pull", "cached", "pulled", "prefetched", "transport", title="")
    for leg in legs:
        times = (leg["queue_seconds"], leg["prefill_seconds"], leg["kv_pull_seconds"])
        tokens = (leg["cached_tokens"], leg["pulled_tokens"], leg["prefetched_tokens"])
        table.add_row(
            Text(leg["worker"]), *map(seconds_text, times), *map(str, tokens), Text(leg["transport"] or "-")
        )
    return table


def _decision(decision: Mapping[str, Any]) -> Table:
    """Show the candidates, cheapest first; the chosen one is marked."""
    candidates = sorted(decision["candidates"], key=lambda candidate: candidate["cost_seconds"])
    terms = list(dict.fromkeys(name for candidate in candidates for name in candidate["terms_seconds"]))
    table = _table("", "placement", "prefill", "decode", "cost", *terms, "cached", title=f"\n{decision['policy']}")
    for candidate in candidates:
        table.add_row(
            "*" if candidate == decision["chosen"] else "",
            candidate["placement"],
            Text(candidate["prefill"] or "-"),
            Text(candidate["decode"]),
            seconds_text(candidate["cost_seconds"]),
            *(seconds_text(candidate["terms_seconds"].get(name, 0.0)) for name in terms),
            str(candidate["expected_cached_tokens"]),
        )
    return table


def _hindsight(found: Mapping[str, Any], predicted: Mapping[str, Any]) -> Text:
    """Compare the cost of the choice with the best one, and name the worst prediction."""
    known, best = found["chosen"], found["best"]
    errors = {
        name: value - predicted["terms_seconds"].get(name, 0.0) for name, value in known["terms_seconds"].items()
    }
    worst = max(errors, key=lambda name: abs(errors[name]))
    if found["regret_ms"]:
        where = " and ".join(filter(None, (best["prefill"], best["decode"])))
        told = f"{best['placement']} on {where} looks {found['regret_ms']:.1f} ms cheaper"
    else:
        told = "no other placement looks cheaper"
    was, expected = known["terms_seconds"][worst], predicted["terms_seconds"].get(worst, 0.0)
    return Text(f"\nin hindsight: {told}; {worst}: {seconds_text(expected)} predicted, {seconds_text(was)} known now")
