"""Describes workers for GET /v1/cluster."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from router.costs.meter import meter_of
from router.routing.rates import WorkerRates
from router.workers.model_workers import ModelWorkers
from router.workers.worker_link import WorkerLink

_SHOWN_INFO = (
    "device", "quantization", "cuda_graphs", "attention_backend", "version", "block_size", "max_num_seqs",
)  # fmt: skip
_SHOWN_MEMORY = ("front_private_bytes", "engine_private_bytes", "engine_shared_bytes")
_SHOWN_LOAD = {
    "running": "num_running", "waiting": "num_waiting", "swapped": "num_swapped", "loading": "num_loading",
    "leases": "num_leases", "kv_blocks": "kv_blocks_total", "kv_blocks_free": "kv_blocks_free",
    "kv_blocks_cached": "kv_blocks_cached",
}  # fmt: skip


def describe(link: WorkerLink, model: ModelWorkers, now: float) -> dict[str, Any]:
    """Describe one worker. model: the model whose worker it is."""
    fields: dict[str, Any] = {
        "id": link.worker_id,
        "role": link.role,
        "state": link.state(now),
        "open_requests": link.num_open,
        "times_lost": link.num_lost,
    }
    if link.refused:
        fields["refused"] = link.refused
    if link.info is not None:
        info, index = link.info, model.index
        fields |= {
            "model": model.name,
            **{name: getattr(info, name) for name in _SHOWN_INFO},
            "transports": list(info.transports),
            "load": {shown: getattr(link.load, name) for shown, name in _SHOWN_LOAD.items()},
            "memory": {
                **{name: getattr(link.load, name) for name in _SHOWN_MEMORY},
                "kv_pool_bytes": info.num_blocks * info.block_bytes,
            },
            "rates": {name: round(rate, 6) for name, rate in _rates(meter_of(link).rates).items()},
            "step_seconds_by_part": asdict(meter_of(link).rates.step_times.cost),
            "index": {
                "state": index.state(link.worker_id).value,
                "blocks": index.num_worker_keys(link.worker_id),
            },
        }
    return fields


def _rates(rates: WorkerRates) -> dict[str, float]:
    """Return measured rates; 0: not measured. The step decodes one short request; prompts have no long context."""
    cost = rates.step_times.cost
    return {
        "prefill_tokens_per_second": 1 / cost.prompt_token if cost.prompt_token else 0.0,
        "pull_tokens_per_second": rates.pull_tokens_per_second,
        "step_seconds": cost.seconds(1),
    }
