"""Where the time of a request went, and what was pulled between workers, from the log of `router/explain`. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

from router.journal import FIRST_OUTPUT, MOVED, WAITING

Span = tuple[str, str, float]  # phase, worker ("" for the router), seconds


def journey(entry: Mapping[str, Any]) -> dict[str, Any]:
    """One entry of `ExplainLog.recent` as the page shows it. The spans sum to the total."""
    return {
        "id": entry["choice"],
        "state": entry["state"],
        "prompt": entry["prompt_tokens"],
        "output": entry["output_tokens"],
        "cached": entry["cached_tokens"],
        "moves": entry["migrations"] + entry["moves"],
        "total": entry["total_seconds"],
        "spans": spans(entry["time_line"], entry["workers"]),
    }


def spans(time_line: Sequence[Mapping[str, Any]], legs: Sequence[Mapping[str, Any]]) -> list[Span]:
    """Phases in order: route, queue, prefill, pull, decode, wait (for a worker), replay (on the next worker).

    time_line: the spans of the log, named by the event before them. legs: what workers measured, one entry for each
    "first output".
    """
    found: list[Span] = []
    measured = iter(legs)
    phase, worker = "route", ""
    computes = "prefill"  # what a decode worker does before its first output, when it has pulled no KV
    for number, span in enumerate(time_line):
        event, seconds = str(span["after"]), float(span["seconds"])
        if event.startswith(("prefill on ", "decode on ")):
            phase, _, worker = event.partition(" on ")
            after = time_line[number + 1]["after"] if number + 1 < len(time_line) else ""
            if after.startswith(FIRST_OUTPUT):
                found += _start_of_leg(phase, worker, seconds, next(measured, {}), computes)
                computes = "decode"
                continue
        elif event.startswith(MOVED):
            phase, worker, computes = "route", "", "replay"
        elif event == WAITING:
            phase, worker = "wait", ""
        found.append((phase, worker, seconds))
    return _merged(found)


def pulls(entry: Mapping[str, Any]) -> list[dict[str, Any]]:
    """KV that legs of a choice have read from the worker of the leg before."""
    legs = entry["workers"]
    return [
        {
            "from": before["worker"],
            "to": leg["worker"],
            "tokens": leg["pulled_tokens"] + leg["prefetched_tokens"],
            "seconds": leg["kv_pull_seconds"],
            "transport": leg["transport"],
        }
        for before, leg in pairwise(legs)
        if leg["pulled_tokens"] + leg["prefetched_tokens"] and before["worker"] != leg["worker"]
    ]


def _start_of_leg(phase: str, worker: str, seconds: float, leg: Mapping[str, Any], computes: str) -> list[Span]:
    """The time from a leg's submission to its first output, by what its worker measured: queue, pull, the rest."""
    queue = min(leg.get("queue_seconds", 0.0), seconds)
    pull = min(leg.get("kv_pull_seconds", 0.0), seconds - queue)
    if phase == "decode" and not pull:
        phase = computes
    return [("queue", worker, queue), ("pull", worker, pull), (phase, worker, seconds - queue - pull)]


def _merged(found: Sequence[Span]) -> list[Span]:
    """Without empty spans, and with equal neighbours as one."""
    merged: list[Span] = []
    for phase, worker, seconds in found:
        if merged and merged[-1][:2] == (phase, worker):
            seconds += merged.pop()[2]
        if seconds > 0:
            merged.append((phase, worker, round(seconds, 6)))
    return merged
