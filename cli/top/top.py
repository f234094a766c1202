"""`mini-infer top`: the cluster as one router sees it, each second, in the terminal."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing

from rich.console import Console
from rich.live import Live

from cli.top.frame import frame
from cli.top.source import add_router_arguments, router_of
from common.config import SettingsParser


def build_parser() -> SettingsParser:
    parser = SettingsParser(prog="mini-infer top", description="Show the cluster of a router, each second.")
    add_router_arguments(parser)
    parser.add_argument("--once", action="store_true", help="print one frame, with the rates of one second, and end")
    return parser


def run(argv: Sequence[str]) -> int:
    arguments = build_parser().parse_args(argv)
    console = Console()
    with router_of(arguments) as router, closing(router.events()) as events:
        facts, num_frames = {}, 0
        with Live(console=console, screen=console.is_terminal and not arguments.once, auto_refresh=False) as live:
            for name, value in events:
                if name == "facts":
                    facts = value
                    continue
                num_frames += 1
                if not arguments.once:
                    live.update(frame(facts, value), refresh=True)
                elif num_frames == 2:  # the first frame has no rates, unless others watch
                    console.print(frame(facts, value))
                    break
    return 0
