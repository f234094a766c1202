"""Opens an EAGLE-3 head on the GPU of the model that it was trained for."""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import Any

import torch

from common.errors import ConfigError
from engine.config import EngineConfig
from engine.gpu.late_compiles import compiles_are_early
from engine.gpu.memory import GRAPH_BYTES
from engine.gpu.runner import DeviceRows, collector_paused
from engine.gpu.steps.rows import bucket_sizes, most_tokens
from engine.kv.memory import pool_geometry
from engine.loader.load import LoadedModel
from engine.speculation.draft_length import DraftLengths
from engine.speculation.eagle.head import EagleHead
from engine.speculation.eagle.opening import read_fitting_head
from engine.speculation.on_gpu.eagle_head import GpuEagleHead, HeadGraphs
from engine.speculation.on_gpu.from_head import FromGpuEagleHead
from engine.speculation.overlap import Overlap

logger = logging.getLogger(__name__)


class GpuEagle:
    """A head whose weights are on the GPU. See OnGpu."""

    def __init__(self, head: EagleHead, config: EngineConfig, loaded: LoadedModel, max_model_len: int) -> None:
        self._head, self._config, self._loaded, self._max_model_len = head, config, loaded, max_model_len
        self._rows: DeviceRows | None = None
        self._on_gpu: GpuEagleHead | None = None

    def num_blocks_left(self, num_blocks: int) -> int:
        """See OnGpu."""
        config, loaded, shape = self._config, self._loaded, self._head.shape
        one = pool_geometry(loaded.config, replace(config, num_gpu_blocks=1), "", loaded.dtype).block_bytes
        own = 2 * shape.num_kv_heads * shape.head_dim * config.block_size * loaded.dtype.itemsize
        logits = 3 * config.max_num_seqs * loaded.config.vocab_size * loaded.dtype.itemsize
        read = len(self._head.layers) * most_tokens(config) * loaded.config.hidden_size * loaded.dtype.itemsize
        graphs = 2 * len(bucket_sizes(config.max_num_seqs)) * GRAPH_BYTES
        left = (num_blocks * one - config.max_num_seqs * own - logits - read - graphs) // (one + own)
        if left < 1:
            raise ConfigError("the EAGLE head leaves no GPU memory for KV blocks: raise --gpu-memory-fraction")
        return left

    def join(self, runner: Any, num_blocks: int) -> None:
        """See OnGpu."""
        config, loaded = self._config, self._loaded
        self._rows = runner.device_rows
        self._on_gpu = GpuEagleHead(
            self._head.shape, self._head.weights, num_blocks, config.block_size, config.max_num_seqs,
            most_tokens(config), self._max_model_len, loaded.config.hidden_size, loaded.config.vocab_size,
        )  # fmt: skip
        runner.observe_with(self._on_gpu)

    def open(
        self, num_blocks: int, num_tokens: int, lengths: DraftLengths, overlap: Overlap | None
    ) -> FromGpuEagleHead:
        """See OnGpu."""
        assert self._rows is not None, "`join` comes first"
        assert self._on_gpu is not None
        table, state, sampler, buckets = self._rows
        graphs = HeadGraphs(self._on_gpu, state, sampler, buckets, self._loaded.device)
        if self._loaded.device.type == "cuda":
            with compiles_are_early(), collector_paused(), torch.inference_mode():  # the model's warm-up came before
                graphs.capture()
        return FromGpuEagleHead(
            graphs, table, buckets, self._max_model_len, self._loaded.config.vocab_size, overlap, lengths, num_tokens
        )


def load_on_gpu(name: str, config: EngineConfig, loaded: LoadedModel) -> GpuEagle:
    """Load the weights, before KV blocks get what is left. Raises ConfigError where the head does not fit the model.

    name: folder or hub id of the head. loaded: the model.
    """
    flag, model = f"--speculative eagle:{name}", loaded.config
    if config.num_ranks > 1:
        raise ConfigError(f"{flag}: the head drafts for a model in one process; leave out --tp and --pp")
    if not model.is_causal:
        raise ConfigError(f"{flag}: {config.model} generates no text")
    if model.windows or model.num_kv_planes == 1:
        raise ConfigError(f"{flag}: on GPUs heads are for models without sliding windows and latent attention")
    head = read_fitting_head(name, loaded)
    if head.shape.head_dim & (head.shape.head_dim - 1):
        raise ConfigError(f"{flag}: on GPUs a head's head_dim must be a power of two, not {head.shape.head_dim}")
    logger.info("drafts by the EAGLE-3 head %s, which reads layers %s", name, head.shape.layers)
    return GpuEagle(head, config, loaded, model.context_length(config.max_model_len))
