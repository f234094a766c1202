"""Attention over whole prompts, where every token sees all others, or those in a window on both sides.

For query i: softmax(q_i K[a..b]^T / sqrt(head_dim)) V[a..b], where a..b is the prompt, or with a window w its tokens
nearer to i than w. A step holds whole prompts, so K and V are used as computed, never read from the pool.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

from common.errors import InvalidRequestError
from engine.cpu.batch import StepBatch
from engine.layers.attention import AttentionBlock
from engine.layers.rotary import Rotation
from engine.loader.load import LoadedModel
from kvstore.layout import PoolGeometry

NAME = "bidirectional"
QUERY_BLOCK = 256  # queries of a window per call, so that the mask stays small for any prompt length


def attend(q: Tensor, keys: Tensor, values: Tensor, window: int = 0) -> Tensor:
    """Compute attention for one prompt.

    q: (n, num_heads, head_dim); keys and values: (num_kv_heads, n, head_dim). window: see above; 0: none. Returns (n,
    num_heads, head_dim).
    """
    if not window or window >= q.shape[0]:
        return _attend(q, keys, values)
    num_tokens = q.shape[0]
    parts = []
    for start in range(0, num_tokens, QUERY_BLOCK):
        stop = min(start + QUERY_BLOCK, num_tokens)
        first, end = max(start - window + 1, 0), min(stop + window - 1, num_tokens)
        distances = torch.arange(start, stop, device=q.device)[:, None] - torch.arange(first, end, device=q.device)
        visible = distances.abs() < window
        parts.append(_attend(q[start:stop], keys[:, first:end], values[:, first:end], visible))
    return torch.cat(parts)


def _attend(q: Tensor, keys: Tensor, values: Tensor, visible: Tensor | None = None) -> Tensor:
    """Attend. visible: bool (num_queries, num_keys); None: all."""
    num_queries, num_heads, head_dim = q.shape
    group = num_heads // keys.shape[0]
    # All queries that share a KV head are rows of one GEMM, since repeating K and V for each query head would copy.
    rows = q.view(num_queries, -1, group, head_dim).permute(1, 2, 0, 3).flatten(1, 2)
    mask = None if visible is None else visible.repeat(group, 1)
    # For masks on a GPU see `attend_causally`.
    with sdpa_kernel(SDPBackend.MATH) if q.is_cuda and mask is not None else nullcontext():
        out = functional.scaled_dot_product_attention(rows[None], keys[None], values[None], attn_mask=mask)
    return out.view(-1, group, num_queries, head_dim).permute(2, 0, 1, 3).flatten(1, 2)


@dataclass(slots=True)
class WholePrompts:
    """Rotations for layers without and with a window, and where each row's tokens start, followed by the end."""

    rotation: Rotation
    local_rotation: Rotation
    starts: Sequence[int]


class BidirectionalAttention:
    """The CPU backend. The warm-up may pass parts of prompts, whose outputs are not used."""

    name = NAME

    def __init__(self, windows: Sequence[int], rotary: Tensor, local_rotary: Tensor | None) -> None:
        """windows: of each layer here, 0: none; empty: no layer has a window. rotary, local_rotary: see `Model`."""
        self._windows = windows
        self._rotary = rotary
        self._local_rotary = local_rotary

    def plan(self, batch: StepBatch, inputs: Tensor) -> WholePrompts:
        """See AttentionBackend. Raises InvalidRequestError for a part of a real request's prompt."""
        for row, request in zip(batch.rows, batch.requests, strict=True):
            if request.params.pooling and (row.start or row.num_tokens != request.num_prompt_tokens):
                raise InvalidRequestError("a prompt is computed as a whole where tokens attend to later ones")
        rotation = Rotation.of(self._rotary, inputs[1])
        local = rotation if self._local_rotary is None else Rotation.of(self._local_rotary, inputs[1])
        return WholePrompts(rotation, local, batch.query_starts)

    def attend(self, block: AttentionBlock, qkv: Tensor, metadata: WholePrompts) -> Tensor:
        """See AttentionBackend; nothing is stored in the pool."""
        window = self._windows[block.layer] if self._windows else 0
        q, kv = block.heads(qkv, metadata.local_rotation if window else metadata.rotation)
        keys, values = block.context(kv.permute(1, 2, 0, 3))
        out = torch.empty_like(q)
        for start, stop in zip(metadata.starts, metadata.starts[1:], strict=False):
            out[start:stop] = attend(q[start:stop], keys[:, start:stop], values[:, start:stop], window)
        return block.outputs(out)


def attention_for(loaded: LoadedModel, kv_pool: Tensor, geometry: PoolGeometry) -> BidirectionalAttention | None:
    """The backend of a model whose tokens attend to later ones; None: it is another one."""
    if loaded.config.is_causal:
        return None
    windows = loaded.config.windows[geometry.layers.start :]
    return BidirectionalAttention(windows, loaded.model.rotary, loaded.model.local_rotary)
