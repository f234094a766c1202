"""A layer's attention, between what transformers' module computes and what an attention backend keeps."""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor
from torch.nn import functional

from engine.layers.attention import AttentionBlock
from engine.layers.block import Attend, LinearRef, Step
from engine.layers.rotary import Rotation
from engine.transformers_models.seam import Call, Layer, check_call


class TransformersAttention(AttentionBlock):
    """q, k and v come normed and rotated.

    The pool's heads are as wide as the wider of K and V; zeros in the other change no product. Backends divide
    scores by sqrt(head_dim): another scale is put on q.
    """

    def __init__(self, index: int, layer: Layer) -> None:
        self.layer, self.softcap, self.has_sinks = index, layer.softcap, layer.has_sinks
        self._of, self._head_dim = layer, max(layer.k_dim, layer.v_dim)
        factor = layer.scale * math.sqrt(self._head_dim)
        self._factor = 1.0 if math.isclose(factor, 1.0, rel_tol=1e-6) else factor

    def __call__(self, x: Tensor, step: Step) -> Tensor:
        raise NotImplementedError("transformers' module is the block around this attention")

    def attend(self, call: Call, attend: Attend) -> Tensor:
        """Returns (1, n, heads, v_dim). Raises UnsupportedModelError, see `check_call`."""
        check_call(call)
        sinks: Tensor | None = call.options.get("s_aux")
        self.sinks = None if sinks is None else sinks.flatten()
        q = call.q if self._factor == 1.0 else call.q * self._factor
        heads = torch.cat([self._padded(each) for each in (q, call.k, call.v)], dim=1)
        return attend(self, heads[0].transpose(0, 1).contiguous())[None]

    def heads(self, qkv: Tensor, rotation: Rotation) -> tuple[Tensor, Tensor]:
        q, kv = qkv[:, : self._of.num_heads], qkv[:, self._of.num_heads :]
        return q, kv.view(-1, 2, self._of.num_kv_heads, self._head_dim)

    def context(self, kv: Tensor) -> tuple[Tensor, Tensor]:
        return kv[0], kv[1]

    def outputs(self, attended: Tensor) -> Tensor:
        return attended[..., : self._of.v_dim].contiguous()

    def linears(self) -> Iterator[LinearRef]:
        return iter(())

    def _padded(self, x: Tensor) -> Tensor:
        missing = self._head_dim - x.shape[-1]
        return functional.pad(x, (0, missing)) if missing else x
