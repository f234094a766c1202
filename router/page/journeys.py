"""Where a request's time went, and which KV was pulled between workers, from the log of `router/explain`. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

from router.journal import FIRST_OUTPUT, MOVED, WAITING

Span = tuple[str, str, float]  # phase, worker ("" for the router), seconds


def journey(entry: Mapping[str, Any]) -> dict[str, Any]:
    """Convert an entry of `ExplainLog.recent` for the page. The spans sum to the total."""
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
    """Return phases in order: route, queue, prefill, pull, decode, wait (for a worker), replay (on the next worker).

    time_line: the log's spans, each named by the event before it. legs: workers' measurements, one for each "first
    output".
    """
    found: list[Span] = []
    measured = iter(legs)
    phase, worker = "route", ""
    computes = "prefill"  # the phase of a decode worker before its first output, if it pulls no KV
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
    """Return the pulls of a choice's legs from the worker of the previous leg."""
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
    """Split the time from a leg's submission to its first output, as the worker measured it: queue, pull, rest."""
    queue = min(leg.get("queue_seconds", 0.0), seconds)
    pull = min(leg.get("kv_pull_seconds", 0.0), seconds - queue)
    if phase == "decode" and not pull:
        phase = computes
    return [("queue", worker, queue), ("pull", worker, pull), (phase, worker, seconds - queue - pull)]


def _merged(found: Sequence[Span]) -> list[Span]:
    """Drop empty spans, and merge neighbours with the same phase and worker."""
    merged: list[Span] = []
    for phase, worker, seconds in found:
        if merged and merged[-1][:2] == (phase, worker):
            seconds += merged.pop()[2]
        if seconds > 0:
            merged.append((phase, worker, round(seconds, 6)))
    return merged
