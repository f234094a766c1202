"""Assembles an engine from its settings: device, model, KV pool, scheduler, runner.

The only place that knows all the parts. The caller provides the pool's memory (`PoolMemory`): plain memory for
`mini_infer.LLM`, a shareable segment for a worker.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from common.model_files import ModelFiles, resolve_model
from common.wings import call_wing, require_wing
from engine.config import EngineConfig, GpuConfig
from engine.engine import Engine
from engine.kv.manager import KVManager
from engine.kv.memory import PoolMemory, context_in_pool, make_kv_manager, pool_geometry
from engine.ranks import RankContext, Ranks
from engine.request import Request
from engine.scheduling.order import ServiceOrder
from engine.scheduling.scheduler import Scheduler
from engine.wings import Adapters, OnProgress, Prepare, no_progress
from kvstore.layout import PoolGeometry

if TYPE_CHECKING:
    from common.text.tokenizer import Tokenizer
    from engine.expert_balancing.rebalancing import Balancing
    from engine.loader.load import LoadedModel
    from engine.objectives.prompt_budget import PromptBudget
    from engine.speculation.drafts import Speculation
    from engine.speculation.on_gpu.open_draft_model import OnGpu

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class EngineParts:
    """An engine, and facts about it that its users need."""

    engine: Engine
    runner: Any  # executes the engine's plans
    files: ModelFiles
    loaded: LoadedModel
    geometry: PoolGeometry
    config: EngineConfig  # without automatic values
    cuda_graphs: bool

    def use_tokenizer(self) -> Tokenizer:
        """Return the model's tokenizer. From now on the engine also stops at the ends of sequence that it names."""
        tokenizer = self.loaded.tokenizer()
        self.engine.eos_token_ids |= frozenset(tokenizer.eos_token_ids)
        return tokenizer


def assemble(
    config: EngineConfig,
    memory: PoolMemory | None = None,
    gpu: GpuConfig | None = None,
    is_offline: bool = False,
    on_progress: OnProgress = no_progress,
) -> EngineParts:
    """Load the model and build its engine. Raises ConfigError, which says what to do.

    is_offline: without services, see `EngineConfig.resolved`.
    """
    with call_wing("engine.start_failures.explained:explained") or nullcontext():
        return _assemble(config, memory or PoolMemory(), gpu or GpuConfig(), is_offline, on_progress)


def _assemble(
    config: EngineConfig, memory: PoolMemory, gpu: GpuConfig, is_offline: bool, on_progress: OnProgress
) -> EngineParts:
    # Imported here because it takes seconds, and after the settings have been checked.
    from engine.loader.load import check_model, load_model, resolve_device

    began = time.monotonic()
    order: ServiceOrder | None = call_wing("engine.custom_policies.load:order_of", config)
    files = resolve_model(config.model)
    device = resolve_device(config)
    asked_tokens = config.max_num_batched_tokens
    config = config.resolved(device.type, is_offline)
    if device.type == "cpu" and config.num_threads:
        torch.set_num_threads(config.num_threads)
    call_wing("engine.eight_bit_kv.scales:check_device", config, device)
    model_config = check_model(files, config)
    preparing: list[Prepare] = []
    if not model_config.is_causal:
        require_wing("engine.bidirectional", f"{model_config.architecture} with attention to later tokens")
        from engine.bidirectional.steps import check_pooled, for_whole_prompts

        preparing.append(check_pooled)
        config = for_whole_prompts(config, model_config, asked_tokens)
    if device.type == "cuda":
        call_wing("engine.prefill_backends.refusals:check_attention", model_config, gpu.attention_backend)
    ranks = Ranks()
    if config.num_ranks > 1:  # starts the other ranks
        ranks = call_wing("engine.tensor_parallel.assembly:FollowedRanks", config, device, gpu)
    with call_wing("engine.start_failures.explained:of_loading") or nullcontext():
        loaded = load_model(files, config, device, ranks.shard, on_progress, ranks.stage)
    balancing: Balancing | None = call_wing("engine.expert_balancing.rebalancing:open_balancing", loaded, config)
    adapters = adapters_of(loaded, config)  # before the pool is sized: they take GPU memory
    drafting: OnGpu | None = call_wing("engine.speculation.proposer:proposer_on_gpu", config, loaded, gpu)  # likewise
    config, geometry, max_model_len = size_pool(loaded, config, gpu, ranks, drafting)
    pool = memory.allocate(geometry, device)
    if memory.agent_socket:
        require_wing("kvstore.tier", "--agent-socket")
    tier: tuple[KVManager, torch.Tensor] | None = call_wing(
        "engine.host_tier.open_tier:open_tier", geometry, config, memory.agent_socket, device
    )
    kv, host_buffer = tier or (make_kv_manager(geometry, config), None)
    runner_args = loaded, pool, host_buffer, config
    make_runner: Callable[..., Any] = partial(_make_runner, *runner_args, gpu, max_model_len)
    if adapters is not None:
        make_runner = partial(adapters.runner, *runner_args, gpu=gpu, max_model_len=max_model_len)
    num_slots = 0 if host_buffer is None else len(host_buffer)
    runner = ranks.runner(make_runner, loaded, memory, geometry, num_slots, max_model_len)
    if drafting is not None:
        drafting.join(runner, geometry.num_blocks)
    constraints = None if is_offline or config.is_simulated else loaded.constraints
    tokens = None if constraints is None else constraints.prepare()
    runner.warmup(on_progress)
    if tokens is not None:
        tokens.exception()  # wait, or the first streams stall; a model without a tokenizer takes no grammars
    speculation: Speculation | None = call_wing(
        "engine.speculation.proposer:open_speculation", config, runner, loaded, drafting, geometry.num_blocks
    )
    prompt_budget: PromptBudget | None = call_wing("engine.objectives.prompt_budget:budget_for", config)
    scheduler = Scheduler(
        kv,
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=config.max_num_batched_tokens,
        max_model_len=max_model_len,
        order=order,
        speculation=speculation,
        prompt_budget=prompt_budget,
        num_stages=ranks.num_stages,
        row_tokens=call_wing("engine.cpu_forms.forms:row_tokens", config, device) or Request.num_row_tokens,
        cuts_prompts=model_config.is_causal,
    )
    parts_of_wings = loaded.vector_modules, loaded.constraints, adapters
    preparing += [part.prepare_request for part in parts_of_wings if part is not None]
    engine = Engine(
        scheduler,
        runner if balancing is None else balancing.counted(runner),
        vocab_size=loaded.config.vocab_size,
        eos_token_ids=frozenset(loaded.config.eos_token_ids),
        preparing=preparing,
        counting=[each for each in (kv, balancing, speculation, prompt_budget, adapters) if each is not None],
        adapters=adapters,
    )
    cuda_graphs = device.type == "cuda" and gpu.use_cuda_graph
    parts = EngineParts(engine, runner, files, loaded, geometry, config, cuda_graphs)
    _log_ready(parts, time.monotonic() - began)
    return parts


def size_pool(
    loaded: LoadedModel, config: EngineConfig, gpu: GpuConfig, ranks: Ranks, drafting: OnGpu | None
) -> tuple[EngineConfig, PoolGeometry, int]:
    """Return the settings with a number of blocks, the geometry and the longest sequence. Raises ConfigError."""
    max_model_len = loaded.config.context_length(config.max_model_len)
    if loaded.device.type == "cuda" and not (config.num_gpu_blocks or config.kv_cache_gb):
        require_wing("engine.memory_profiling", "a GPU without --kv-cache-gb or --num-gpu-blocks")
        from engine.memory_profiling.profile import num_blocks_that_fit  # needs triton

        num_blocks = num_blocks_that_fit(loaded, config, gpu, max_model_len, *ranks.in_trials(loaded, config))
        if drafting is not None:
            num_blocks = drafting.num_blocks_left(num_blocks)
        config = replace(config, num_gpu_blocks=num_blocks)
    geometry = pool_geometry(loaded.config, config, loaded.fingerprint, loaded.dtype, loaded.shard)
    geometry = replace(geometry, num_blocks=ranks.num_blocks(loaded, geometry, config))
    return config, geometry, context_in_pool(max_model_len, geometry, config)


def _log_ready(parts: EngineParts, seconds: float) -> None:
    geometry = parts.geometry
    logger.info(
        "%s on %s: %s, %d KV blocks of %d tokens at %d bytes (%.2f GB), KV %s, ready in %.1f s",
        parts.files.name,
        parts.loaded.device,
        parts.loaded.quant_mode,
        geometry.num_blocks,
        geometry.block_size,
        geometry.block_bytes // geometry.block_size,
        geometry.pool_bytes / 2**30,
        geometry.layout,
        seconds,
    )


def adapters_of(loaded: LoadedModel, config: EngineConfig) -> Adapters | None:
    """Open the adapters of a model, or of a rank's part of it; None if it serves none. Raises ConfigError."""
    adapters: Adapters | None = call_wing("engine.lora.adapters:open_adapters", loaded, config)
    return adapters


def _make_runner(
    loaded: LoadedModel,
    pool: torch.Tensor,
    host_buffer: torch.Tensor | None,
    config: EngineConfig,
    gpu: GpuConfig,
    max_model_len: int,
    *ranks: RankContext[Any],
) -> Any:
    """Make the runner for the model's device. ranks: this process's RankContext, if there are other ranks."""
    if loaded.device.type == "cuda":
        from engine.gpu.runner import GpuRunner  # needs triton

        return GpuRunner(loaded, pool, host_buffer, config, gpu, max_model_len, *ranks)
    if config.is_simulated:
        return call_wing("engine.simulated.runner:SimulatedRunner", loaded, pool, host_buffer, config)
    runner = call_wing("engine.transformers_models.runner:runner_of", loaded, pool, host_buffer, config)
    if runner is not None:
        return runner
    from engine.cpu.runner import CpuRunner

    return CpuRunner(loaded, pool, host_buffer, config, *ranks)
