"""What excludes what: one table of features, of pairs that are refused, and of features that need another one.

`check` is the only place that refuses combinations of settings; docs/compatibility.md shows the table. `check_wings`
refuses features whose wing is not installed. What a model or a GPU cannot do is refused where the model is read
(`engine/loader/supported.py`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from common.errors import ConfigError
from common.wings import require_wing

if TYPE_CHECKING:
    from engine.config import EngineConfig


@dataclass(frozen=True, slots=True)
class Feature:
    """One capability, the setting that turns it on, and how to see that in the settings.

    wings: packages that it needs; empty: the core alone.
    """

    name: str
    setting: str
    is_on: Callable[[EngineConfig], bool]
    wings: tuple[str, ...] = ()


# What several processes of a model need, whatever they divide: these wings import each other.
RANKS = ("engine.tensor_parallel", "engine.pipeline_parallel", "engine.expert_parallel", "engine.expert_balancing")
TENSOR = Feature("tensor parallelism", "--tp", lambda c: c.tp > 1, RANKS)
PIPELINE = Feature("pipeline parallelism", "--pp", lambda c: c.pp > 1, RANKS)
REMOTE_STAGE = Feature("a stage on another host", "--stage-address", lambda c: bool(c.stage_address))
EXPERT = Feature("expert parallelism", "--expert-parallel", lambda c: c.expert_parallel)
DISPATCH = Feature(
    "dispatch of tokens to experts", "--expert-exchange dispatch", lambda c: c.expert_exchange != "sum"
)
COUNTS = Feature(
    "counts of experts", "--expert-load-file", lambda c: bool(c.expert_load_file),
    ("engine.expert_balancing", "engine.expert_parallel"),
)  # fmt: skip
PLACEMENT = Feature("placed experts", "--expert-placement", lambda c: bool(c.expert_placement))
REBALANCING = Feature(
    "experts that move while serving", "--expert-rebalance-interval", lambda c: c.expert_rebalance_interval != 0
)
REPLICAS = Feature("replicas of experts", "--num-redundant-experts", lambda c: c.num_redundant_experts > 0)
DRAFTS = Feature(
    "speculative decoding",
    "--num-speculative-tokens",
    lambda c: c.num_speculative_tokens > 0,
    ("engine.speculation",),
)
OBJECTIVES = Feature(
    "latency objectives", "--itl-objective-ms", lambda c: c.itl_objective_ms > 0, ("engine.scheduling.prompt_budget",)
)
QUANTIZED = Feature("quantized weights", "--quant-mode", lambda c: c.quant_mode not in ("auto", "none"))
EIGHT_BIT_KV = Feature("8-bit KV", "--kv-cache-dtype fp8", lambda c: c.kv_cache_dtype == "fp8")
SWAP = Feature("preemption by swapping", "--preemption swap", lambda c: c.preemption == "swap")
HOST_TIER = Feature("host tier", "--host-tier-gb", lambda c: c.host_tier_gb > 0, ("kvstore.tier",))
SIMULATION = Feature("simulated steps", "--simulated-steps", lambda c: bool(c.simulated_steps))
GPU = Feature("a GPU asked for", "--device cuda", lambda c: c.device == "cuda")
FEATURES = (
    TENSOR, PIPELINE, REMOTE_STAGE, EXPERT, DISPATCH, COUNTS, PLACEMENT, REBALANCING, REPLICAS, DRAFTS, OBJECTIVES,
    QUANTIZED, EIGHT_BIT_KV, SWAP, HOST_TIER, SIMULATION, GPU,
)  # fmt: skip

_ONE_GPU = "--simulated-steps takes the place of one GPU: leave --device cuda, --tp, --pp and drafts out"
_COUNTED = "--pp with --expert-load-file, --expert-placement or --expert-rebalance-interval is not supported yet"
REFUSED: tuple[tuple[Feature, Feature, str], ...] = (
    (SIMULATION, GPU, _ONE_GPU),
    (SIMULATION, TENSOR, _ONE_GPU),
    (SIMULATION, PIPELINE, _ONE_GPU),
    (SIMULATION, DRAFTS, _ONE_GPU),
    (
        PIPELINE, DISPATCH,
        "--expert-exchange dispatch divides tokens among ranks, and a stage of --pp passes all of them on: use "
        "--expert-exchange sum, or leave --pp out",
    ),
    (PIPELINE, COUNTS, _COUNTED),
    (PIPELINE, PLACEMENT, _COUNTED),
    (PIPELINE, REBALANCING, _COUNTED),
    (
        PIPELINE, OBJECTIVES,
        "--pp with --itl-objective-ms is not supported yet: a stream's gap is a round of all stages, not a step",
    ),
    (REMOTE_STAGE, TENSOR, "--stage-address with --tp is not supported: leave one out"),
)  # fmt: skip
# A feature, and those of which it needs at least one.
NEEDED: tuple[tuple[Feature, tuple[Feature, ...], str], ...] = (
    (EXPERT, (TENSOR,), "--expert-parallel divides experts among ranks: give --tp"),
    (
        DISPATCH, (EXPERT,),
        "--expert-exchange dispatch is between ranks that have whole experts: give --expert-parallel",
    ),
    (PLACEMENT, (EXPERT,), "--expert-placement is of ranks that have whole experts: give --expert-parallel"),
    (
        REPLICAS, (PLACEMENT, REBALANCING),
        "--num-redundant-experts: which ones, --expert-placement or --expert-rebalance-interval says",
    ),
    (
        REBALANCING, (EXPERT,),
        "--expert-rebalance-interval exchanges experts between ranks that have whole ones: give --expert-parallel",
    ),
)  # fmt: skip


def check(config: EngineConfig) -> None:
    """Raise ConfigError for features that exclude each other, or lack one that they need."""
    on = {feature.name for feature in FEATURES if feature.is_on(config)}
    for one, other, reason in REFUSED:
        if one.name in on and other.name in on:
            raise ConfigError(reason)
    for feature, needed, reason in NEEDED:
        if feature.name in on and not any(each.name in on for each in needed):
            raise ConfigError(reason)


def check_wings(config: EngineConfig) -> None:
    """Raise ConfigError for features whose wing this installation lacks."""
    for feature in FEATURES:
        for wing in feature.wings if feature.is_on(config) else ():
            require_wing(wing, feature.setting)
