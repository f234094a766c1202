"""Opens a head of one layer on the model's GPU: an EAGLE-3 head, or the model's MTP module."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from common.errors import ConfigError
from common.model_files import resolve_model
from engine.config import EngineConfig
from engine.gpu.runner import collector_paused
from engine.gpu.steps.rows import RowTable, bucket_sizes, most_tokens
from engine.gpu.steps.samples import StepSamples
from engine.kv.memory import pool_geometry
from engine.late_compiles.log import compiles_are_early
from engine.loader.load import LoadedModel
from engine.memory_profiling.profile import GRAPH_BYTES
from engine.speculation.draft_length import DraftLengths
from engine.speculation.eagle.opening import read_fitting_head
from engine.speculation.heads.whole import check_ranks
from engine.speculation.mtp.opening import FLAG, read_module
from engine.speculation.on_gpu.eagle_head import GpuEagleHead
from engine.speculation.on_gpu.from_head import FromGpuHead
from engine.speculation.on_gpu.head import GpuHead, HeadGraphs, HeadSize
from engine.speculation.on_gpu.mtp_module import GpuMtpModule
from engine.speculation.overlap import Overlap

logger = logging.getLogger(__name__)


class HeadOnGpu:
    """A head whose weights are on the GPU. See OnGpu."""

    def __init__(
        self, make: Callable[[HeadSize], GpuHead], kept: int, num_layers: int, config: EngineConfig,
        loaded: LoadedModel,
    ) -> None:  # fmt: skip
        """kept: numbers of KV that the head stores per token. num_layers: of the model, whose inputs it reads."""
        self._make, self._kept, self._num_layers = make, kept, num_layers
        self._config, self._loaded = config, loaded
        self._max_model_len = loaded.config.context_length(config.max_model_len)
        self._rows: tuple[RowTable, StepSamples] | None = None
        self._on_gpu: GpuHead | None = None

    def num_blocks_left(self, num_blocks: int) -> int:
        """See OnGpu."""
        config, loaded = self._config, self._loaded
        one = pool_geometry(
            loaded.config, replace(config, num_gpu_blocks=1), "", loaded.dtype, loaded.shard
        ).block_bytes
        own = self._kept * config.block_size * loaded.dtype.itemsize
        logits = 3 * config.max_num_seqs * loaded.config.vocab_size * loaded.dtype.itemsize
        read = self._num_layers * most_tokens(config) * loaded.config.hidden_size * loaded.dtype.itemsize
        graphs = 2 * len(bucket_sizes(config.max_num_seqs)) * GRAPH_BYTES
        left = (num_blocks * one - config.max_num_seqs * own - logits - read - graphs) // (one + own)
        if left < 1:
            raise ConfigError("the head leaves no GPU memory for KV blocks: raise --gpu-memory-fraction")
        return left

    def join(self, runner: Any, num_blocks: int) -> None:
        """See OnGpu."""
        config, model_size = self._config, self._loaded.config.hidden_size
        runner = getattr(runner, "local", runner)  # of rank 0, if there are several
        self._rows = runner.device_rows
        size = HeadSize(
            num_blocks, config.block_size, config.max_num_seqs, most_tokens(config), self._max_model_len, model_size
        )
        self._on_gpu = self._make(size)
        runner.observe_with(self._on_gpu)

    def open(self, num_blocks: int, num_tokens: int, lengths: DraftLengths, overlap: Overlap | None) -> FromGpuHead:
        """See OnGpu."""
        assert self._rows is not None, "`join` comes first"
        assert self._on_gpu is not None
        table, samples = self._rows
        graphs = HeadGraphs(self._on_gpu, samples.state, samples.on_device, table.buckets, self._loaded.device)
        if self._loaded.device.type == "cuda":
            with compiles_are_early(), collector_paused(), torch.inference_mode():  # the model's warm-up came before
                graphs.capture()
        return FromGpuHead(
            graphs, table, self._max_model_len, self._loaded.config.vocab_size, overlap, lengths, num_tokens
        )


def load_eagle_head(name: str, config: EngineConfig, loaded: LoadedModel) -> HeadOnGpu:
    """Load the head before KV blocks get the rest of memory. Raises ConfigError if it does not fit the model.

    name: folder or hub id of the head. loaded: the model.
    """
    flag, model = f"--speculative eagle:{name}", loaded.config
    check_ranks(flag, config)
    if not model.is_causal:
        raise ConfigError(f"{flag}: {config.model} generates no text")
    if model.windows and all(model.windows):  # blocks of windows are freed while the head still needs them
        raise ConfigError(
            f"{flag}: on GPUs a head needs a model with a layer that sees all tokens, not windows alone"
        )
    head = read_fitting_head(name, config, loaded)
    if head.shape.head_dim & (head.shape.head_dim - 1):
        raise ConfigError(f"{flag}: on GPUs a head's head_dim must be a power of two, not {head.shape.head_dim}")
    logger.info("drafts by the EAGLE-3 head %s, which reads layers %s", name, head.shape.layers)
    shape = head.shape

    def make(size: HeadSize) -> GpuEagleHead:
        return GpuEagleHead(shape, head.weights, size, model.vocab_size)

    return HeadOnGpu(make, 2 * shape.num_kv_heads * shape.head_dim, len(head.layers), config, loaded)


def load_module(config: EngineConfig, loaded: LoadedModel) -> HeadOnGpu:
    """Load the model's own MTP module before KV blocks get the rest of memory. Raises ConfigError."""
    check_ranks(FLAG, config)
    with torch.inference_mode():
        module = read_module(resolve_model(config.model), config, loaded)
    model = loaded.config
    kept = model.num_kv_planes * model.num_kv_heads * model.head_dim
    return HeadOnGpu(lambda size: GpuMtpModule(module, model, size), kept, 1, config, loaded)
