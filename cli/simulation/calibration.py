"""Uses a running cluster's measurements of its workers for the workers of a simulation."""

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
ROWS, TOKENS = 8, 512  # rows of a reference decode step, and tokens of their contexts and of a reference prompt step


def calibrated(config: ClusterConfig) -> ClusterConfig:
    """Return the settings with step costs and sizes of the cluster at `like`. Raises ConfigError."""
    if not config.like:
        return config
    with ApiClient(config.like, config.api_key) as client:
        return calibrated_by(config, client.get_json("/v1/cluster")["workers"])


def calibrated_by(config: ClusterConfig, workers: Sequence[Mapping[str, Any]]) -> ClusterConfig:
    """Return the settings with costs of measured workers, from one or more `GET /v1/cluster`.

    The costs of rows, contexts and prompts are medians over the workers that have measured them; the base costs,
    `base` and `prompt_token`, are then set so that typical steps take as long as theirs. Pulls are unchanged: a
    cluster's measured rate includes the fixed costs of short ones.
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
    """Format the parts of a step cost for `SimulatedCost.parse`."""
    return ",".join(f"{name}={parts[name]!r}" for name in PARTS if name in parts)
