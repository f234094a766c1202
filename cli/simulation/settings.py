"""Settings of simulated clusters."""

from __future__ import annotations

from dataclasses import dataclass

from common.config import check_not_negative, require, setting
from engine.simulated.step_cost import SimulatedCost
from router.routing.policy import POLICIES

# About an H200 with 7B parameters in bfloat16, from steps of an engine alone (docs/benchmarks.md "In simulated
# time").
H200_7B = "base=0.0041,row=8e-6,context=14e-9,prompt=0.0014,prompt_token=20e-6,prompt_context=0.8e-9,weights=0.0033"


@dataclass(frozen=True)
class ClusterConfig:
    """Simulate a cluster under a load: the router's policy and the engine's scheduler, with steps of a cost model."""

    decode_workers: int = setting(1, "workers that decode; without --prefill-workers they compute prompts, too")
    prefill_workers: int = setting(0, "workers that compute prompts")
    like: str = setting("", "URL of a cluster whose workers' measured steps and sizes are taken for these")
    api_key: str = setting("", "of that cluster's operators")
    steps: str = setting(H200_7B, "seconds of a step's parts; default: about an H200 with 7B parameters in bfloat16")
    prefill_steps: str = setting("", "those of prefill workers; default: the same")
    mixed_ms: float = setting(0.0, "time that a step with prompts and decode rows takes above the sum of its parts")
    num_gpu_blocks: int = setting(24_000, "KV blocks of a worker")
    prefill_num_gpu_blocks: int = setting(0, "those of a prefill worker; 0: as many")
    block_size: int = setting(64, "tokens per KV block")
    max_num_seqs: int = setting(256, "sequences in one step")
    max_num_batched_tokens: int = setting(8192, "tokens in one step")
    policy: str = setting("cost", "the router's policy", choices=tuple(POLICIES))
    local_prefill_tokens: int = setting(64, "prompts up to this length are computed where they are decoded")
    ttft_objective_ms: float = setting(0.0, "placements keep first tokens below this; 0: no objective")
    itl_objective_ms: float = setting(0.0, "placements and prompt chunks keep gaps below this; 0: no objective")
    hop_ms: float = setting(0.5, "a message between client, router and worker")
    accept_ms: float = setting(
        3.0, "what a router takes to read a request, and a client its first token, beyond that"
    )
    turn_ms: float = setting(0.3, "from the end of a step until a worker plans another one")
    pull_ms: float = setting(1.0, "a pull of KV until its first byte")
    pull_tokens_per_second: float = setting(200_000.0, "tokens whose KV a worker pulls in a second")
    host_tier_blocks: int = setting(0, "KV blocks in the memory of a host, which its workers share; 0: none")
    workers_per_host: int = setting(8, "workers of a host")
    host_tokens_per_second: float = setting(
        800_000.0, "tokens whose KV a step copies from host memory in a second; copies to it run while steps do"
    )

    def __post_init__(self) -> None:
        check_not_negative(
            self,
            "prefill_workers",
            "prefill_num_gpu_blocks",
            "local_prefill_tokens",
            "ttft_objective_ms",
            "itl_objective_ms",
            "mixed_ms",
            "hop_ms",
            "accept_ms",
            "turn_ms",
            "pull_ms",
            "host_tier_blocks",
        )
        for name in (
            "decode_workers", "num_gpu_blocks", "block_size", "max_num_seqs", "pull_tokens_per_second",
            "workers_per_host", "host_tokens_per_second",
        ):  # fmt: skip
            require(getattr(self, name) > 0, f"--{name.replace('_', '-')} must be positive")
        require(self.max_num_batched_tokens >= self.max_num_seqs, "--max-num-batched-tokens is below --max-num-seqs")
        SimulatedCost.parse(self.steps)
        SimulatedCost.parse(self.prefill_steps or self.steps)


@dataclass(frozen=True)
class AgainstConfig:
    """Comparison with a running cluster."""

    against: str = setting(
        "", "URL of a cluster that replays the --trace, too, once a load of --num-requests has shown what it takes"
    )
