"""Reference of the persistent kernel, in torch and float32."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from kernels.gpu.persistent.decoder import Parameters
from kernels.gpu.persistent.shape import HEAD_DIM, LATENT_RANK, ROPE_DIM, Shape


def decode_reference(
    shape: Shape, parameters: Parameters, pool: Tensor, token_ids: Tensor, positions: Tensor, lengths: Tensor,
    slots: Tensor, block_table: Tensor,
) -> Tensor:  # fmt: skip
    """Compute what `PersistentDecoder.step` does, in float32 (1, hidden), for a row of length 1 or more."""
    eps, num_keys, slot = parameters.eps, int(lengths), int(slots)
    cos, sin = parameters.rotary[int(positions)].float()
    x = parameters.embedding[int(token_ids)].float()
    for layer, weights in enumerate(parameters.weights):
        if shape.is_e4m3:
            scaled = zip(weights, parameters.scales[layer], strict=False)
            weights = *(weight.float() * scales[..., None] for weight, scales in scaled), *weights[4:]
        qkv, output, gate_up, down = weights[0].float(), weights[1].float(), weights[2], weights[3]
        norms = parameters.norms[layer].float()
        before, after, of_heads = torch.split(norms, [shape.hidden, shape.hidden, len(norms) - 2 * shape.hidden])
        heads = qkv @ _normed(x, before, eps)
        if shape.has_biases:
            heads += parameters.biases[layer][0].float()
        attend = _attend_latents if shape.is_latent else _attend
        x = x + output @ attend(
            heads, of_heads, (cos, sin), shape, parameters, pool, layer, num_keys, slot, block_table
        )
        normed = _normed(x, after, eps)
        if shape.experts:
            shares, chosen = _choose(weights[4].float() @ normed, shape, layer)
            for share, expert in zip(shares, chosen.tolist(), strict=True):
                x = x + share * _mlp(normed, gate_up[expert], down[expert])
        else:
            x = x + _mlp(normed, gate_up, down)
    return _normed(x, parameters.final_norm.float(), eps)[None]


def _mlp(x: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
    gate, up = (gate_up.float() @ x).chunk(2)
    return down.float() @ (functional.silu(gate) * up)


def _choose(logits: Tensor, shape: Shape, layer: int) -> tuple[Tensor, Tensor]:
    if layer < shape.dense_layers:
        return logits.new_ones(shape.chosen), torch.arange(shape.chosen)
    shares, chosen = logits.softmax(-1).topk(shape.chosen - shape.shared)
    if shape.normalizes:
        shares = shares / shares.sum()
    of_shared = torch.arange(shape.experts, shape.experts + shape.shared, device=chosen.device)
    return torch.cat([shares, shares.new_ones(shape.shared)]), torch.cat([chosen, of_shared])


def _attend(
    heads: Tensor, norms: Tensor, rotation: tuple[Tensor, Tensor], shape: Shape, parameters: Parameters, pool: Tensor,
    layer: int, num_keys: int, slot: int, block_table: Tensor,
) -> Tensor:  # fmt: skip
    """Compute the concatenated outputs of all heads from W_qkv x; store the new K and V in the pool."""
    eps, (of_q, of_k) = parameters.eps, norms.view(2, -1)
    q, k, v = torch.split(heads.view(-1, HEAD_DIM), [shape.heads, shape.kv_heads, shape.kv_heads])
    if shape.has_qk_norms:
        q, k = _normed(q, of_q, eps), _normed(k, of_k, eps)
    q, k = (_rotated(each, rotation) for each in (q, k))
    kv = pool[block_table[0].long(), layer].float().permute(1, 2, 0, 3, 4).flatten(2, 3)[:, :, :num_keys]
    keys, values = kv.clone()
    keys[:, -1], values[:, -1] = k, v
    if slot >= 0:
        block, offset = divmod(slot, shape.block_size)
        pool[block, layer, :, :, offset] = torch.stack([k, v]).to(pool.dtype)
    keys, values = (each.repeat_interleave(shape.group, 0) for each in (keys, values))
    scores = (keys @ q[:, :, None])[:, None, :, 0] * parameters.scale
    attended: Tensor = scores.softmax(-1) @ values
    return attended.flatten()


def _attend_latents(
    heads: Tensor, norm: Tensor, rotation: tuple[Tensor, Tensor], shape: Shape, parameters: Parameters, pool: Tensor,
    layer: int, num_keys: int, slot: int, block_table: Tensor,
) -> Tensor:  # fmt: skip
    """See `_attend`."""
    w_uk, w_uv = (weight.float() for weight in parameters.latents[layer])
    q, c, k_rope = torch.split(heads, [shape.heads * (HEAD_DIM + ROPE_DIM), LATENT_RANK, ROPE_DIM])
    q_nope, q_rope = torch.split(q.view(shape.heads, -1), [HEAD_DIM, ROPE_DIM], dim=1)
    queries = torch.cat([(w_uk @ q_nope[:, :, None])[:, :, 0], _rotated(q_rope, rotation)], dim=1)
    new = torch.cat([_normed(c, norm, parameters.eps), _rotated(k_rope, rotation)])
    latents = pool[block_table[0].long(), layer, 0, 0].float().flatten(0, 1)[:num_keys].clone()
    latents[-1] = new
    if slot >= 0:
        block, offset = divmod(slot, shape.block_size)
        pool[block, layer, 0, 0, offset] = new.to(pool.dtype)
    attended = (queries @ latents.T * parameters.scale).softmax(-1) @ latents[:, :LATENT_RANK]
    values: Tensor = w_uv @ attended[:, :, None]
    return values.flatten()


def _rotated(x: Tensor, rotation: tuple[Tensor, Tensor]) -> Tensor:
    cos, sin = rotation
    return x * cos + x.roll(x.shape[-1] // 2, -1) * sin


def _normed(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight
