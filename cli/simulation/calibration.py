"""Takes what a running cluster has measured of its workers for those of a simulation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from statistics import median
from typing import Any

from cli.client.api_client import ApiClient
from cli.simulation.settings import ClusterConfig
from common.errors import ConfigError
from common.pairs import num_pairs
from engine.simulated.step_cost import SimulatedCost

PARTS = [field.name for field in fields(SimulatedCost) if field.name != "spread"]
ROWS, TOKENS = 8, 512  # of a step that decodes such contexts, of one that computes such a prompt


def calibrated(config: ClusterConfig) -> ClusterConfig:
    """The settings with the steps and sizes of the cluster that `like` names. Raises ConfigError."""
    if not config.like:
        return config
    with ApiClient(config.like, config.api_key) as client:
        return calibrated_by(config, client.get_json("/v1/cluster")["workers"])


def calibrated_by(config: ClusterConfig, workers: Sequence[Mapping[str, Any]]) -> ClusterConfig:
    """workers: of one or more `GET /v1/cluster`. What rows, contexts and prompts add is the median of those who have
    measured it; what a step takes at all, `base` and `prompt_token`, then makes usual steps last as long as theirs.

    Pulls stay as they are: what a cluster knows of them has the fixed part of short ones in its rate.
    """
    known = [worker for worker in workers if worker.get("step_seconds_by_part")]
    costs = [SimulatedCost(**worker["step_seconds_by_part"]) for worker in known]
    parts: dict[str, float] = {}
    if decodes := [cost for cost in costs if cost.base]:
        row, context = (median(getattr(cost, name) for cost in decodes) for name in ("row", "context"))
        usual = median(cost.seconds(ROWS, context=ROWS * TOKENS) for cost in decodes)
        parts |= {"base": max(usual - ROWS * (row + TOKENS * context), 0.0), "row": row, "context": context}
    if computes := [cost for cost in costs if cost.prompt_token]:
        prompt, pair = (median(getattr(cost, name) for cost in computes) for name in ("prompt", "prompt_context"))
        pairs = num_pairs(0, TOKENS)
        usual = median(cost.seconds(0, TOKENS, pairs=pairs) for cost in computes)
        token = max(usual - prompt - pair * pairs, 0.0) / TOKENS
        parts |= {"prompt": prompt, "prompt_token": token, "prompt_context": pair}
    missing = {"base", "prompt_token"} - parts.keys()
    if missing:
        raise ConfigError(f"--like {config.like}: no worker has measured its steps yet; send it a load first")
    return replace(
        config,
        steps=steps_of(parts),
        num_gpu_blocks=min(w["load"]["kv_blocks"] for w in known),
        block_size=known[0]["block_size"],
        max_num_seqs=min(w["max_num_seqs"] for w in known),
    )


def steps_of(parts: Mapping[str, float]) -> str:
    """Parts of a step by name, as `SimulatedCost.parse` reads them."""
    return ",".join(f"{name}={parts[name]!r}" for name in PARTS if name in parts)
