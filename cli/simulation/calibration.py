"""Takes what a running cluster has measured of its workers for those of a simulation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from statistics import median
from typing import Any

from cli.api_client import ApiClient
from cli.simulation.settings import ClusterConfig
from common.errors import ConfigError
from common.step_times import StepCost

PARTS = [field.name for field in fields(StepCost) if field.name != "spread"]


def calibrated(config: ClusterConfig) -> ClusterConfig:
    """The settings with the steps and sizes of the cluster that `like` names. Raises ConfigError."""
    if not config.like:
        return config
    with ApiClient(config.like, config.api_key) as client:
        return calibrated_by(config, client.get_json("/v1/cluster")["workers"])


def calibrated_by(config: ClusterConfig, workers: Sequence[Mapping[str, Any]]) -> ClusterConfig:
    """workers: of `GET /v1/cluster`. Each part of a step is the median of the workers that have measured it.

    Pulls stay as they are: what a cluster knows of them has the fixed part of short ones in its rate.
    """
    known = [worker for worker in workers if worker.get("step_seconds_by_part")]
    found = {name: [w["step_seconds_by_part"][name] for w in known] for name in PARTS}
    parts = {name: median(measured) for name, values in found.items() if (measured := [v for v in values if v])}
    missing = {"base", "prompt_token"} - parts.keys()
    if missing:
        raise ConfigError(f"--like {config.like}: no worker has measured its steps yet; send it a load first")
    return replace(
        config,
        steps=",".join(f"{name}={seconds!r}" for name, seconds in parts.items()),
        num_gpu_blocks=min(w["load"]["kv_blocks"] for w in known),
        block_size=known[0]["block_size"],
        max_num_seqs=min(w["max_num_seqs"] for w in known),
    )
