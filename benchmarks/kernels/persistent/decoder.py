"""A dense decoder of random weights, what its kernel needs on the device, and what torch computes in float32."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from benchmarks.kernels.persistent.layers import LOG2_E, NUM_STAMPS, decoder_kernel
from benchmarks.kernels.persistent.shape import HEAD_DIM, Shape

EPS = 1e-6


class Decoder:
    """One row over a paged pool. x: what the layers add to, float32 (hidden,)."""

    def __init__(self, shape: Shape, num_layers: int, max_keys: int, device: torch.device | str) -> None:
        hidden, kv_heads, block = shape.hidden, shape.kv_heads, shape.block_size
        self.shape, self.num_layers = shape, num_layers
        is_meta = torch.device(device).type == "meta"

        def random(*sizes: int, spread: float = 1.0) -> Tensor:
            if is_meta:
                return torch.empty(*sizes, dtype=torch.bfloat16, device=device)
            return (torch.randn(*sizes, device=device) * spread).to(torch.bfloat16)

        def layer() -> tuple[Tensor, ...]:
            sizes = (shape.qkv, hidden), (hidden, shape.attended), (2 * shape.intermediate, hidden)
            return tuple(random(n, k, spread=k**-0.5) for n, k in (*sizes, (hidden, shape.intermediate)))

        self.weights = [layer() for _ in range(num_layers)]
        self.norms = random(num_layers, shape.norms)
        num_blocks = -(-max_keys // block)
        self.pool = random(num_blocks, num_layers, 2, kv_heads, block, HEAD_DIM)
        self.table = torch.arange(num_blocks, dtype=torch.int32, device=device)
        angles = torch.arange(HEAD_DIM // 2, dtype=torch.float32, device=device) * 0.01
        self.rotation = torch.empty(2, HEAD_DIM, device=device)
        addresses = torch.zeros(num_layers, 4, dtype=torch.int64, device=device)
        if not is_meta:
            self.table = self.table.flip(0).contiguous()
            sines = torch.cat([-angles.sin(), angles.sin()])
            self.rotation = torch.stack([torch.cat([angles.cos()] * 2), sines])
            addresses.copy_(torch.tensor([[each.data_ptr() for each in layer] for layer in self.weights]))
        self._addresses = addresses
        counts = hidden, hidden, shape.qkv, kv_heads * shape.splits * shape.combined_words, shape.attended
        words = [torch.zeros(n, dtype=torch.int32, device=device) for n in (*counts, shape.intermediate, 1)]
        self._x, self._epoch, self._words = words[0], words[-1], words
        self.stamps = torch.zeros(num_layers, shape.programs, NUM_STAMPS.value, dtype=torch.int64, device=device)

    @property
    def x(self) -> Tensor:
        return self._x.view(torch.float32)

    def start(self, x: Tensor) -> None:
        """As a token's embedding does."""
        self._x.copy_((x.view(torch.int32) & -2) | (self._epoch & 1))

    def step(self, num_keys: int) -> Any:
        """All layers, for a row that sees so many keys with its own. Returns the compiled kernel."""
        cooperative = {} if self._x.device.type == "meta" else {"launch_cooperative_grid": True}
        return decoder_kernel[(self.shape.programs,)](
            self._addresses, self.norms, self.pool, self.table, self.rotation, *self._words, self.stamps,
            self.num_layers, num_keys, EPS, LOG2_E.value / math.sqrt(HEAD_DIM), self.pool.stride(1),
            self.pool.stride(0), SHAPE=self.shape, num_warps=8, **cooperative,
        )  # fmt: skip

    def reference(self, num_keys: int) -> Tensor:
        """What `x` is after a step."""
        shape, x = self.shape, self.x.clone()
        for layer, parts in enumerate(self.weights):
            qkv, output, gate_up, down = (each.float() for each in parts)
            norms = torch.split(self.norms[layer].float(), [shape.hidden, shape.hidden, HEAD_DIM, HEAD_DIM])
            heads = (qkv @ _normed(x, norms[0])).view(-1, HEAD_DIM)
            q, k, v = torch.split(heads, [shape.heads, shape.kv_heads, shape.kv_heads])
            q, k = self._rotated(_normed(q, norms[2])), self._rotated(_normed(k, norms[3]))
            kv = self.pool[self.table.long(), layer].float().permute(1, 2, 0, 3, 4).flatten(2, 3)[:, :, :num_keys]
            keys, values = kv.clone()
            keys[:, -1], values[:, -1] = k, v
            keys, values = (each.repeat_interleave(shape.group, 0) for each in (keys, values))
            scores = (keys @ q[:, :, None])[:, None, :, 0] / math.sqrt(HEAD_DIM)
            x = x + output @ (scores.softmax(-1) @ values).flatten()
            gate, up = (gate_up @ _normed(x, norms[1])).chunk(2)
            x = x + down @ (functional.silu(gate) * up)
        return x

    def _rotated(self, x: Tensor) -> Tensor:
        return x * self.rotation[0] + x.roll(HEAD_DIM // 2, -1) * self.rotation[1]


def _normed(x: Tensor, weight: Tensor) -> Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + EPS) * weight


def step_bytes(shape: Shape, num_layers: int, num_keys: int) -> int:
    """What a step reads once: weights and KV."""
    columns = shape.hidden * (shape.qkv + shape.attended + 3 * shape.intermediate)
    return 2 * num_layers * (columns + 2 * num_keys * shape.kv_heads * HEAD_DIM)
