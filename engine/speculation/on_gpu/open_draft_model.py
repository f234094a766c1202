"""Opens a draft model on its target's GPU: first the weights, then the rest, once the KV pools have their sizes."""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace
from typing import Any, Protocol

from common.errors import ConfigError
from common.model_files import ModelFiles
from common.wings import has_wing
from engine.config import EngineConfig, GpuConfig
from engine.kv.memory import allocate_pool, context_in_pool, make_kv_manager, pool_geometry
from engine.late_compiles.log import compiles_are_early
from engine.loader.load import LoadedModel
from engine.memory_profiling.profile import measure
from engine.prefill_backends.refusals import check_attention
from engine.runner import Proposer
from engine.speculation.draft_length import DraftLengths
from engine.speculation.draft_model import VocabSizes
from engine.speculation.on_gpu.draft_model import FromGpuDraftModel, GpuDraftRunner
from engine.speculation.open_draft_model import load_draft_model
from engine.speculation.overlap import Overlap
from kvstore.layout import PoolGeometry

logger = logging.getLogger(__name__)


class OnGpu(Protocol):
    """A proposer's weights on the GPU, before the KV pool is sized."""

    def num_blocks_left(self, num_blocks: int) -> int:
        """Return how many of the KV blocks remain if the proposer takes its share. Raises ConfigError."""
        ...

    def join(self, runner: Any, num_blocks: int) -> None:
        """Join the steps of the model's runner, whose graphs are not captured yet."""
        ...

    def open(self, num_blocks: int, num_tokens: int, lengths: DraftLengths, overlap: Overlap | None) -> Proposer:
        """Capture its graphs. num_blocks: of the model's pool. num_tokens: most drafts of a row."""
        ...


@dataclass(frozen=True, slots=True)
class GpuDraftModel:
    """A draft model whose weights are on the GPU. It gets as many KV blocks as its target."""

    files: ModelFiles
    loaded: LoadedModel
    config: EngineConfig
    gpu: GpuConfig
    sizes: VocabSizes
    block: PoolGeometry
    target_block_bytes: int
    graph_bytes: int  # memory of its graphs

    def num_blocks_left(self, num_blocks: int) -> int:
        """See OnGpu: both models get the same number of blocks."""
        room, block_bytes = num_blocks * self.target_block_bytes, self.target_block_bytes + self.block.block_bytes
        if room < self.graph_bytes + block_bytes:
            raise ConfigError(
                f"the draft model {self.files.name} leaves no GPU memory for KV blocks: its graphs take "
                f"{self.graph_bytes / 1e9:.1f} of {room / 1e9:.1f} GB. Raise --gpu-memory-fraction, or choose "
                "another one"
            )
        return (room - self.graph_bytes) // block_bytes

    def join(self, runner: Any, num_blocks: int) -> None:
        """See OnGpu: it has its own runner."""

    def open(
        self, num_blocks: int, num_tokens: int, lengths: DraftLengths, overlap: Overlap | None
    ) -> FromGpuDraftModel:
        """See OnGpu. Also allocates the KV pool."""
        geometry, config = replace(self.block, num_blocks=num_blocks), replace(self.config, num_gpu_blocks=num_blocks)
        max_model_len = context_in_pool(self.loaded.config.context_length(0), geometry, config)
        pool = allocate_pool(geometry, self.loaded.device)
        runner = GpuDraftRunner(num_tokens, self.loaded, pool, None, config, self.gpu, max_model_len)
        with compiles_are_early():  # the target's warm-up came before
            runner.warmup()
        kv = make_kv_manager(geometry, config)
        logger.info("drafts by %s, %d KV blocks", self.files.name, num_blocks)
        return FromGpuDraftModel(
            runner, overlap, kv, lengths, num_tokens, config.max_num_batched_tokens, max_model_len, self.sizes
        )


def load_on_gpu(name: str, target_config: EngineConfig, target: LoadedModel, gpu: GpuConfig) -> GpuDraftModel:
    """Load the weights before KV blocks get the rest of memory. Raises ConfigError."""
    if target_config.pp > 1:
        raise ConfigError(f"--speculative draft:{name}: on GPUs no draft model helps pipeline stages; leave out --pp")
    files, loaded, config, sizes = load_draft_model(name, target_config, target.config.vocab_size, target.device)
    without_tier: dict[str, Any] = {"host_tier_gb": 0.0} if has_wing("engine.host_tier") else {}
    config = replace(config, **without_tier)
    check_attention(loaded.config, gpu.attention_backend)
    one = replace(config, num_gpu_blocks=1)
    block = pool_geometry(loaded.config, one, loaded.fingerprint, loaded.dtype)
    of_target = pool_geometry(
        target.config, replace(target_config, num_gpu_blocks=1), "", target.dtype, target.shard
    ).block_bytes
    graph_bytes = 0
    if not (config.num_gpu_blocks or config.kv_cache_gb):
        graph_bytes = measure(loaded, block, one, gpu, loaded.config.context_length(0)).graph_bytes
    return GpuDraftModel(files, loaded, config, gpu, sizes, block, of_target, graph_bytes)
