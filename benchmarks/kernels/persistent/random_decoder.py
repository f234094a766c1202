"""A dense decoder with random weights and random KV, for its persistent kernel."""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.gpu.persistent.decoder import Parameters, PersistentDecoder
from kernels.gpu.persistent.reference import decode_reference
from kernels.gpu.persistent.shape import HEAD_DIM, LATENT_RANK, ROPE_DIM, Shape

EPS, VOCAB = 1e-6, 64


class RandomDecoder:
    """One row with up to `max_keys` tokens."""

    def __init__(self, shape: Shape, num_layers: int, max_keys: int, device: torch.device | str) -> None:
        hidden, kv_heads, block = shape.hidden, shape.kv_heads, shape.block_size
        is_meta = torch.device(device).type == "meta"

        def random(*sizes: int, spread: float = 1.0) -> Tensor:
            if is_meta:
                return torch.empty(*sizes, dtype=torch.bfloat16, device=device)
            return (torch.randn(*sizes, device=device) * spread).to(torch.bfloat16)

        def matrix(*sizes: int) -> Tensor:
            return random(*sizes, spread=sizes[-1] ** -0.5)

        def quantized(weight: Tensor) -> tuple[Tensor, Tensor]:
            """Return the weight in e4m3, and the scales of its rows."""
            scales = weight.abs().amax(-1).float() / torch.finfo(torch.float8_e4m3fn).max
            return (weight / scales[..., None]).to(torch.float8_e4m3fn), scales

        def layer() -> tuple[Tensor, ...]:
            attention = matrix(shape.qkv, hidden), matrix(hidden, shape.attended)
            gate_up, down = (2 * shape.intermediate, hidden), (hidden, shape.intermediate)
            if not shape.experts:
                return *attention, matrix(*gate_up), matrix(*down)
            count = shape.experts + shape.shared
            stacks = matrix(count, *gate_up), matrix(count, *down)
            return *attention, *stacks, matrix(shape.experts, hidden)

        angles = torch.arange(max_keys)[:, None] * 0.9 ** torch.arange(shape.rotated // 2)
        cos, sin = angles.cos(), angles.sin()
        rotary = torch.stack([torch.cat([cos, cos], -1), torch.cat([-sin, sin], -1)], 1).to(device, torch.bfloat16)
        weights, scales = [layer() for _ in range(num_layers)], []
        if shape.is_e4m3:
            for index, plain in enumerate(weights):
                pairs = [quantized(weight) for weight in plain[:4]]
                weights[index] = *(weight for weight, _ in pairs), *plain[4:]
                scales.append(tuple(each for _, each in pairs))
        norms = random(num_layers, shape.norms), random(hidden)
        if not shape.has_qk_norms:
            norms[0][:, 2 * hidden :] = 1
        biases = [(random(shape.qkv),) for _ in range(num_layers)] if shape.has_biases else []
        latents: list[tuple[Tensor, ...]] = []
        of_token = 2, kv_heads, block, HEAD_DIM
        if shape.is_latent:
            of_token = 1, 1, block, LATENT_RANK + ROPE_DIM
            for _ in range(num_layers):
                absorbing = random(shape.heads, LATENT_RANK, HEAD_DIM, spread=LATENT_RANK**-0.5)
                latents.append((absorbing, matrix(shape.heads, 2 * HEAD_DIM, LATENT_RANK)[:, HEAD_DIM:]))
        embedding = random(VOCAB, hidden)
        self.parameters = Parameters(
            weights, *norms, embedding, rotary, EPS, scales, biases, latents, scale=float(shape.head_dim**-0.5)
        )
        num_blocks = -(-max_keys // block)
        self.pool = random(num_blocks, num_layers, *of_token)
        self._table = torch.arange(num_blocks - 1, -1, -1, dtype=torch.int32)[None]
        self._token = torch.zeros(1, dtype=torch.int64, device=device)
        self.kernel = PersistentDecoder(shape, self.parameters, self.pool)

    def inputs(self, num_keys: int) -> tuple[Tensor, ...]:
        """Return a step's inputs for a row that sees `num_keys` keys, including its own; 0: an empty row."""
        position, block_size, device = max(num_keys - 1, 0), self.pool.shape[4], self.pool.device
        block = int(self._table[0, position // block_size])
        slot = block * block_size + position % block_size if num_keys else -1
        numbers = (torch.tensor([each], dtype=torch.int32, device=device) for each in (position, num_keys, slot))
        return (self._token, *numbers, self._table.to(device))

    def reference(self, num_keys: int) -> Tensor:
        return decode_reference(self.kernel.shape, self.parameters, self.pool, *self.inputs(num_keys))


def step_bytes(shape: Shape, num_layers: int, num_keys: int) -> int:
    """Return the bytes of weights and KV that a step reads once."""
    of_key = LATENT_RANK + ROPE_DIM if shape.is_latent else 2 * shape.kv_heads * HEAD_DIM
    return num_layers * (shape.layer_bytes + 2 * num_keys * of_key)
