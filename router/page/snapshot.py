"""What the page shows: facts about workers, which change rarely, and figures of each second. Changes nothing.

The figures of a worker are a list in the order of COLUMNS: a hundred workers take a few kilobytes a second.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

from common import VERSION
from kvstore.types import WorkerId
from router.costs.meter import meter_of
from router.explain.log import ExplainLog
from router.gateway import Gateway
from router.page.journeys import journey, pulls
from router.routing.settings import RoutingSettings
from router.workers.worker_link import WorkerLink

COLUMNS = (
    "state", "open", "running", "waiting", "loading", "leases", "blocks", "free", "cached", "step_ms", "decode_rate",
    "prefill_rate", "lost",
)  # fmt: skip
NUM_JOURNEYS = 12
NUM_SEARCHED = 64  # newest choices searched for pulls
IDLE_SECONDS = 2.0  # without a step, after which its duration is not shown


@dataclass(frozen=True)
class Before:
    """Counts at the previous snapshot, to compute differences. In the first snapshot rates are 0."""

    time: float = 0.0
    decoded: Mapping[WorkerId, int] = field(default_factory=dict)  # tokens so far, by worker
    computed: Mapping[WorkerId, int] = field(default_factory=dict)  # prompt tokens so far, by worker
    pulls: Mapping[str, int] = field(default_factory=dict)  # number already shown, by choice


def facts(gateway: Gateway) -> dict[str, Any]:
    """Return what changes only when workers come, go or restart."""
    config = gateway.config
    return {
        "router": {
            "host": socket.gethostname(),
            "pid": os.getpid(),
            "version": VERSION,
            "policy": config.of(RoutingSettings).policy,
            "can_operate": bool(config.api_key),
        },
        "models": [model.name for model in gateway.models],
        "columns": COLUMNS,
        "workers": [worker_facts(link, gateway.workers.model_of(link).name) for link in _links(gateway)],
    }


def _links(gateway: Gateway) -> list[WorkerLink]:
    """Return all workers, prefill workers first, then by name: x-2 before x-10."""
    return sorted(
        gateway.workers.links, key=lambda link: (link.role != "prefill", len(link.worker_id), link.worker_id)
    )


def worker_facts(link: WorkerLink, model: str) -> dict[str, Any]:
    told: dict[str, Any] = {
        "id": link.worker_id,
        "role": link.role,
        "host": link.address.rpartition(":")[0],
        "address": link.address,
        "model": model,
        "refused": link.refused,
    }
    if (info := link.info) is not None:
        told |= {
            "device": info.device,
            "quantization": info.quantization,
            "attention": info.attention_backend,
            "transports": list(info.transports),
            "version": info.version,
            "max_running": info.max_num_seqs,
            "kv_bytes": info.num_blocks * info.block_bytes,
        }
    return told


def figures(gateway: Gateway, before: Before, now: float) -> tuple[dict[str, Any], Before]:
    """Return the cluster's current figures, and the counts for the next call. now: from time.monotonic()."""
    links = _links(gateway)
    decoded = {link.worker_id: meter_of(link).rates.num_decoded for link in links}
    computed = {link.worker_id: meter_of(link).rates.num_computed for link in links}
    seconds = now - before.time
    entries = list(chain.from_iterable(_recent(model.dispatcher.log, now) for model in gateway.base_models))
    new_pulls, shown_pulls = _new_pulls(entries, before.pulls)
    told = {
        "time": round(time.time(), 3),
        "models": {
            model.name: [model.dispatcher.num_running, model.dispatcher.num_waiting] for model in gateway.base_models
        },
        "workers": [
            worker_figures(
                link,
                now,
                _rate(decoded, before.decoded, link.worker_id, seconds),
                _rate(computed, before.computed, link.worker_id, seconds),
            )
            for link in links
        ],
        "pulls": [*_open_pulls(gateway), *(new_pulls if before.time else ())],
        "requests": [journey(entry) for entry in entries[:NUM_JOURNEYS]],
    }
    return told, Before(now, decoded, computed, shown_pulls)


def worker_figures(link: WorkerLink, now: float, decode_rate: float, prefill_rate: float) -> list[Any]:
    """Return the figures in the order of COLUMNS. Rates are tokens per second."""
    load = link.load
    is_idle = now - link.last_step > IDLE_SECONDS
    return [
        link.state(now),
        link.num_open,
        load.num_running,
        load.num_waiting + load.num_swapped,
        load.num_loading,
        load.num_leases,
        load.kv_blocks_total,
        load.kv_blocks_free,
        load.kv_blocks_cached,
        0 if is_idle else round(load.step_seconds * 1e3, 2),
        round(decode_rate, 1),
        round(prefill_rate, 1),
        link.num_lost,
    ]


def _rate(
    totals: Mapping[WorkerId, int], before: Mapping[WorkerId, int], worker_id: WorkerId, seconds: float
) -> float:
    """Return a worker's rate; 0 if it is new or has restarted its count."""
    return max(totals[worker_id] - before.get(worker_id, totals[worker_id]), 0) / seconds if seconds else 0.0


def _recent(log: object, now: float) -> list[dict[str, Any]]:
    return log.recent(NUM_SEARCHED, now) if isinstance(log, ExplainLog) else []


def _open_pulls(gateway: Gateway) -> list[dict[str, Any]]:
    """Return the pulls of legs on decode workers that have not had their first output."""
    found = []
    for model in gateway.base_models:
        for journal in model.dispatcher.open_choices:
            last = journal.events[-1][1] if journal.events else ""
            if journal.kv_handle is not None and last.startswith("decode on "):
                to = last.removeprefix("decode on ")
                found.append({"from": journal.kv_handle.worker_id, "to": to, "tokens": journal.kv_handle.num_tokens})
    return found


def _new_pulls(
    entries: Sequence[Mapping[str, Any]], shown: Mapping[str, int]
) -> tuple[list[dict[str, Any]], dict[str, int]]:
    """Return the pulls since the previous snapshot, and the number of pulls of each choice."""
    new: list[dict[str, Any]] = []
    counts: dict[str, int] = {}
    for entry in entries:
        if found := pulls(entry):
            counts[entry["choice"]] = len(found)
            new += found[shown.get(entry["choice"], 0) :]
    return new, counts
