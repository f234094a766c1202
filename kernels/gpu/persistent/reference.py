"""What the kernel computes, by torch in float32."""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn import functional

from kernels.gpu.persistent.decoder import Parameters
from kernels.gpu.persistent.shape import HEAD_DIM, Shape


def decode_reference(
    shape: Shape, parameters: Parameters, pool: Tensor, token_ids: Tensor, positions: Tensor, lengths: Tensor,
    slots: Tensor, block_table: Tensor,
) -> Tensor:  # fmt: skip
    """See `PersistentDecoder.step`: the same in float32 (1, hidden), of a row that has a length."""
    eps, num_keys, slot = parameters.eps, int(lengths), int(slots)
    cos, sin = parameters.rotary[int(positions)].float()
    x = parameters.embedding[int(token_ids)].float()
    for layer, weights in enumerate(parameters.weights):
        if shape.is_e4m3:
            scaled = zip(weights, parameters.scales[layer], strict=False)
            weights = *(weight.float() * scales[..., None] for weight, scales in scaled), *weights[4:]
        qkv, output, gate_up, down = weights[0].float(), weights[1].float(), weights[2], weights[3]
        sizes = [shape.hidden, shape.hidden, HEAD_DIM, HEAD_DIM]
        before, after, of_q, of_k = torch.split(parameters.norms[layer].float(), sizes)
        heads = qkv @ _normed(x, before, eps)
        if shape.has_biases:
            heads += parameters.biases[layer][0].float()
        heads = heads.view(-1, HEAD_DIM)
        q, k, v = torch.split(heads, [shape.heads, shape.kv_heads, shape.kv_heads])
        if shape.has_qk_norms:
            q, k = _normed(q, of_q, eps), _normed(k, of_k, eps)
        q, k = (each * cos + each.roll(HEAD_DIM // 2, -1) * sin for each in (q, k))
        kv = pool[block_table[0].long(), layer].float().permute(1, 2, 0, 3, 4).flatten(2, 3)[:, :, :num_keys]
        keys, values = kv.clone()
        keys[:, -1], values[:, -1] = k, v
        if slot >= 0:
            block, offset = divmod(slot, shape.block_size)
            pool[block, layer, :, :, offset] = torch.stack([k, v]).to(pool.dtype)
        keys, values = (each.repeat_interleave(shape.group, 0) for each in (keys, values))
        scores = (keys @ q[:, :, None])[:, None, :, 0] / math.sqrt(HEAD_DIM)
        x = x + output @ (scores.softmax(-1) @ values).flatten()
        normed = _normed(x, after, eps)
        if shape.experts:
            shares, chosen = _choose(weights[4].float() @ normed, shape)
            for share, expert in zip(shares, chosen.tolist(), strict=True):
                x = x + share * _mlp(normed, gate_up[expert], down[expert])
        else:
            x = x + _mlp(normed, gate_up, down)
    return _normed(x, parameters.final_norm.float(), eps)[None]


def _mlp(x: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
    gate, up = (gate_up.float() @ x).chunk(2)
    return down.float() @ (functional.silu(gate) * up)


def _choose(logits: Tensor, shape: Shape) -> tuple[Tensor, Tensor]:
    shares, chosen = logits.softmax(-1).topk(shape.chosen)
    return shares / shares.sum() if shape.normalizes else shares, chosen


def _normed(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight
