"""How much of a GPU's memory KV blocks may have: measured by running the largest steps before the pool exists.

    need  = torch's peak over the largest steps + decode graphs + what the driver keeps for this process
    KV    = the smaller of   total * fraction - need   and   what is free beyond that need

`--gpu-memory-fraction` is this process's share of the whole GPU, weights included: two workers on one GPU get 0.45
each. Torch's own numbers count this process alone, so neighbours that start at the same moment do not disturb them.
"""

from __future__ import annotations

import gc
import logging
import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch

from common.errors import ConfigError
from common.wings import has_wing
from engine.config import EngineConfig, GpuConfig
from engine.engine import Runner
from engine.gpu.pinning import NUM_PIECES, PIECE_BYTES
from engine.gpu.steps.rows import bucket_sizes
from engine.kv.memory import allocate_pool, pool_geometry
from engine.loader.load import LoadedModel
from engine.plan import StepPlan
from engine.request import SamplingParams
from engine.trial_plans import trial_plan
from kvstore.layout import PoolGeometry

if TYPE_CHECKING:
    from engine.gpu.ops.rules import GpuSeams
    from engine.ranks import RankContext

logger = logging.getLogger(__name__)
TRIAL_BLOCKS = 64  # sequences of a trial share them: what they hold does not matter
DRIVER_BYTES = 1_000_000_000  # context, kernels, libraries; 0.7 to 0.9 GB were measured
GRAPH_BYTES = 12_000_000  # the driver's share of one decode graph
GRAPH_SLACK = 1.25  # a graph's memory pool against the peak of the same step without one
COPY_BYTES = NUM_PIECES * PIECE_BYTES  # of copies to and from host slots; the trials have none


@dataclass(frozen=True, slots=True)
class MemoryUse:
    """What was measured, in bytes. `process_bytes` and `free_bytes` are of the same moment, after the trials."""

    total_bytes: int
    free_bytes: int
    process_bytes: int  # weights and all else that torch holds for this process now
    peak_bytes: int  # the most that torch holds in the largest steps, KV blocks not counted
    graph_bytes: int


def kv_bytes(use: MemoryUse, fraction: float, block_bytes: int) -> int:
    """Memory for KV blocks. Raises ConfigError with the numbers when it does not hold one."""
    share = int(use.total_bytes * fraction)
    need = use.peak_bytes + use.graph_bytes + DRIVER_BYTES
    others = use.total_bytes - use.free_bytes - use.process_bytes - DRIVER_BYTES
    left = min(share - need, use.free_bytes - (use.peak_bytes - use.process_bytes) - use.graph_bytes)
    if left < block_bytes:
        raise ConfigError(
            f"no GPU memory is left for KV blocks: of {_gb(use.total_bytes)}, --gpu-memory-fraction {fraction} gives "
            f"this worker {_gb(share)}; weights and the largest step need {_gb(use.peak_bytes)}, graphs and driver "
            f"{_gb(use.graph_bytes + DRIVER_BYTES)}; {_gb(use.free_bytes)} are free and other processes hold about "
            f"{_gb(max(others, 0))}. Raise the fraction, lower --max-num-batched-tokens or --max-num-seqs, stop what "
            "else runs on the GPU, or choose a smaller model"
        )
    if left < share - need:
        logger.warning(
            "other processes hold GPU memory: %s for KV blocks instead of the %s that --gpu-memory-fraction %s gives",
            _gb(left), _gb(share - need), fraction,
        )  # fmt: skip
    return left


def prefill_trials(config: EngineConfig, max_model_len: int, num_groups: int = 1) -> list[StepPlan]:
    """The steps that need most: as many sequences as fit, all with log-probabilities; and the longest.

    num_groups: KV groups of the model, here and below.
    """
    rows = min(config.max_num_seqs, config.max_num_batched_tokens)
    each = min(config.max_num_batched_tokens // rows, max_model_len - 1)
    last = min(config.max_num_batched_tokens, max_model_len - 1)
    params = SamplingParams(max_tokens=1, temperature=1.0, seed=0, logprobs=0)
    shares = [(0, each)] * rows, [(max_model_len - 1 - last, last)]
    return [trial_plan(share, config.block_size, params, TRIAL_BLOCKS, num_groups) for share in shares]


def decode_trial(config: EngineConfig, num_groups: int = 1) -> StepPlan:
    """The largest decode step that a graph is captured for."""
    params = SamplingParams(max_tokens=1, temperature=1.0, seed=0, top_p=0.9)
    return trial_plan([(1, 1)] * config.max_num_seqs, config.block_size, params, TRIAL_BLOCKS, num_groups)


def num_blocks_that_fit(
    loaded: LoadedModel, config: EngineConfig, gpu: GpuConfig, max_model_len: int, bytes_of_ranks: int = 0,
    *ranks: RankContext[GpuSeams],
) -> int:  # fmt: skip
    """KV blocks of a rank's part of the model. Raises ConfigError with the numbers.

    bytes_of_ranks: what meeting the other ranks will take. ranks: for trials that the others take no part in.
    """
    one = replace(config, num_gpu_blocks=1)
    geometry = pool_geometry(loaded.config, one, loaded.fingerprint, loaded.dtype, loaded.shard)
    use = measure(loaded, geometry, config, gpu, max_model_len, *ranks)
    use = replace(use, graph_bytes=use.graph_bytes + bytes_of_ranks)
    return kv_bytes(use, gpu.gpu_memory_fraction, geometry.block_bytes) // geometry.block_bytes


def measure(
    loaded: LoadedModel, geometry: PoolGeometry, config: EngineConfig, gpu: GpuConfig, max_model_len: int,
    *ranks: RankContext[GpuSeams],
) -> MemoryUse:  # fmt: skip
    """Run the trials with a pool of a few blocks, and forget it all. geometry: of the pool to come."""
    from engine.gpu.runner import GpuRunner  # needs triton

    device = loaded.device
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats(device)
    pool = allocate_pool(replace(geometry, num_blocks=TRIAL_BLOCKS), device)
    # Graphs are not captured here: the step that they would hold is measured instead.
    no_graphs = replace(gpu, use_cuda_graph=False)
    runner = GpuRunner(loaded, pool, None, config, no_graphs, max_model_len, *ranks)
    count = len(geometry.layout.groups)
    graph_bytes, prompts = 0, None
    if gpu.use_cuda_graph:
        peak = _peak_of(runner, decode_trial(config, count), device)
        num_graphs = len(bucket_sizes(config.max_num_seqs))
        num_sets = math.prod(config.of(wing).num_graph_sets for wing in config.wings)
        graph_bytes += num_sets * (int(peak * GRAPH_SLACK) + num_graphs * GRAPH_BYTES)
    if gpu.use_cuda_graph and has_wing("engine.prompt_graphs"):
        from engine.prompt_graphs.shapes import prompt_graph_trial

        prompts = runner.open_prompt_graphs(captures=False)  # for its workspaces
        peak = _peak_of(runner, prompt_graph_trial(config, max_model_len, TRIAL_BLOCKS, count), device)
        num_logits = sum(rows for _, rows in prompts.shapes) * loaded.model.config.vocab_size
        own_bytes = int(peak * GRAPH_SLACK) + len(prompts.shapes) * GRAPH_BYTES + num_logits * loaded.dtype.itemsize
        graph_bytes += own_bytes * math.prod(config.of(wing).num_prompt_graph_sets for wing in config.wings)
    for plan in prefill_trials(config, max_model_len, count):
        runner.launch(plan).result()
    torch.cuda.synchronize(device)
    peak = torch.cuda.max_memory_reserved(device) - pool.nbytes + COPY_BYTES
    del pool, runner, prompts
    gc.collect()
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info(device)
    return MemoryUse(total, free, torch.cuda.memory_reserved(device), peak, graph_bytes)


def _gb(num_bytes: int) -> str:
    return f"{num_bytes / 1e9:.1f} GB"


def _peak_of(runner: Runner, plan: StepPlan, device: torch.device) -> int:
    """Bytes that one step allocates at most. The step runs twice: the first time compiles and fills caches."""
    runner.launch(plan).result()
    before = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    runner.launch(plan).result()
    return torch.cuda.max_memory_allocated(device) - before
