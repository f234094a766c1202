"""One forward pass on a GPU: the model's ops, with attention over the paged KV pool.

Shapes are static and the host reads nothing, so a pass over decode rows can be captured in a CUDA graph.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from common.wings import call_wing
from engine.gpu.attention.backend import GpuAttention, GpuInputs
from engine.gpu.attention.grouped import GroupedQueries
from engine.gpu.lowering import GpuForwards, Observer
from engine.gpu.ops.rules import SINGLE_GPU, GpuSeams, GpuStep, ops_of
from engine.layers.attention import AttentionBlock
from engine.models.model import Model
from engine.ranks import RankContext


def attention_of(model: Model) -> type[GpuAttention]:
    """Return the attention class of the model; all of its blocks use the same one."""
    own = [ops_of(each) for each in model.blocks if isinstance(each, AttentionBlock) and each.gpu_ops]
    if own:
        return own[0].attention
    return call_wing("engine.speculation.on_gpu.verified_queries:attention") or GroupedQueries


RowDecoder = Callable[[GpuInputs], Tensor]
"""Hidden states (1, hidden) of a step of one decode row after the final norm: the whole pass, with attention."""


class FusedForward:
    """The model over one pool. Its workspaces serve one stream. wanted, max_tokens: see `GpuAttention`."""

    def __init__(
        self,
        model: Model,
        pool: Tensor,
        max_rows: int,
        wanted: str,
        dtype: torch.dtype,
        max_tokens: int,
        ranks: RankContext[GpuSeams] = SINGLE_GPU,
    ) -> None:
        model = ranks.inbox.model(model)
        self.attention = attention_of(model)(model, pool, max_rows, wanted, dtype, max_tokens)
        self._forwards = GpuForwards(model, ranks)
        self._inbox = ranks.inbox
        self.row_decoder: RowDecoder | None = None  # runs unobserved steps of one decode row, also in graphs
        self.passes_on = ranks.passes_on
        self.dtype = model.embedding.dtype
        self.logits = self._forwards.logits

    def observe_with(self, observer: Observer) -> None:
        """Let `observer` see all later steps, except those of graphs that are captured already."""
        self._forwards.show(observer)

    @property
    def is_observed(self) -> bool:
        return self._forwards.observer is not None

    def observe(
        self, inputs: GpuInputs, sampled: Tensor, last: Tensor | None = None, lengths: Tensor | None = None
    ) -> None:
        """Pass the sampled tokens to the observer, if there is one: see `Observer.take`."""
        if (observer := self._forwards.observer) is not None:
            observer.take(inputs, sampled, last, lengths)

    def of_ops(self, forwards: GpuForwards) -> FusedForward:
        """Return this pass with the ops of `forwards`."""
        found = copy.copy(self)
        found._forwards, found.row_decoder, found.logits = forwards, None, forwards.logits
        return found

    def hidden(self, inputs: GpuInputs) -> Tensor:
        """Return hidden states (num_tokens or num_wanted, hidden) after the final norm.

        A pipeline stage that is not the last returns the residual instead.
        """
        is_one_row = inputs.token_ids.shape[0] == 1 and not inputs.has_prompts
        if is_one_row and self.row_decoder is not None and not self.is_observed:
            return self.row_decoder(inputs)
        self.attention.plan_decode(inputs)
        token_ids = self._inbox.token_ids(inputs.token_ids)
        kind = token_ids.shape[0], not inputs.has_prompts
        attend, wanted = partial(self.attention.attend, inputs), inputs.wanted
        step = GpuStep(token_ids, inputs.groups[0].slots, attend, wanted)
        hidden = self._forwards.choose(*kind).hidden(step)
        return hidden if wanted is None or self._forwards.narrows(*kind) else hidden[wanted]
