"""What a process is among ranks on GPUs: the forms of its blocks, its part of the vocabulary, its neighbours."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from engine.config import EngineConfig
from engine.expert_balancing.gpu_moves import bytes_of_moves, open_rearranger
from engine.expert_parallel.gpu_divided_rows import DividedRowsForm
from engine.gpu import memory
from engine.gpu.config import GpuConfig
from engine.gpu.lowering import GpuSeams
from engine.gpu.ops.form import Form, is_plain_alone
from engine.gpu.steps.rows import most_tokens
from engine.layers.forward import AddNorm
from engine.loader.load import LoadedModel
from engine.models.model import Model
from engine.moe.gpu_experts import StackedExperts
from engine.pipeline_parallel.ends import HiddenInbox, HiddenSource
from engine.pipeline_parallel.gpu_stages import ends_alone, stage_bytes
from engine.ranks import EMBEDDING, NO_LISTENER, HiddenSink, RankContext
from engine.tensor_parallel.gpu_group import DeviceGroup, VocabShards, group_bytes
from engine.tensor_parallel.gpu_ops import QuantizedTensorParallelForm, TensorParallelForm


class ShardSeams(GpuSeams):
    """Of one rank among several, which has a shard of every layer."""

    def __init__(self, group: DeviceGroup, vocab_size: int) -> None:
        """vocab_size: of the whole model."""
        self._group = group
        self.vocabulary = VocabShards(group, vocab_size)

    def forms(self, model: Model, experts: Mapping[int, StackedExperts]) -> list[Form]:
        group = self._group
        if not is_plain_alone(model):
            return [QuantizedTensorParallelForm(model, group), TensorParallelForm(model, group, experts)]
        of_ranks = TensorParallelForm if group.rows is None else DividedRowsForm
        return [of_ranks(model, group, experts)]

    def sum(self, model: Model) -> AddNorm[Tensor]:
        """See GpuSeams. The kernel that sums over ranks writes its norm, too, which is dropped."""
        norm, eps = model.blocks[0].norm, model.config.rms_norm_eps  # any has the width

        def fold(residual: Tensor, pending: Tensor | None) -> Tensor:
            assert pending is not None, "the stream starts with a pending output"
            self._group.all_reduce_rms_norm(pending, residual, norm, eps)
            return residual

        return fold


def gpu_ranks(
    loaded: LoadedModel,
    config: EngineConfig,
    group: DeviceGroup | None = None,
    source: HiddenSource | None = None,
    sink: HiddenSink | None = None,
) -> RankContext[GpuSeams]:
    """What this process is. group: of the ranks that have the other shards. source, sink: the stages around it."""
    seams = GpuSeams() if group is None else ShardSeams(group, loaded.config.vocab_size)
    inbox, listener = EMBEDDING, NO_LISTENER
    if source is not None:
        shape = most_tokens(config), loaded.config.hidden_size
        inbox = HiddenInbox(source, torch.zeros(shape, dtype=loaded.dtype, device=loaded.device))
    if config.expert_rebalance_interval and group is not None:
        listener = open_rearranger(loaded, group)
    return RankContext(seams, inbox, sink, listener)


def num_blocks_that_fit(loaded: LoadedModel, config: EngineConfig, gpu: GpuConfig, max_model_len: int) -> int:
    """See `engine.gpu.memory`: in steps of this rank alone, and beside the memory that it meets others through."""
    of_ranks = group_bytes(loaded, config) + stage_bytes(loaded, config) + bytes_of_moves(loaded, config)
    alone = gpu_ranks(loaded, config, None, *ends_alone(loaded))
    return memory.num_blocks_that_fit(loaded, config, gpu, max_model_len, of_ranks, alone)
