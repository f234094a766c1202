"""Launches the persistent kernel and owns its buffers on the device."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from kernels.gpu.persistent.experts import LOG2_E
from kernels.gpu.persistent.layers import decoder_kernel
from kernels.gpu.persistent.shape import HEAD_DIM, LATENT_RANK, NUM_ADDRESSES, Shape
from kernels.gpu.persistent.stamps import NUM_STAMPS
from kernels.gpu.persistent.stream import BIAS, LATENT, SCALES


@dataclass(frozen=True, slots=True)
class Parameters:
    """The tensors of a model, all contiguous, and bfloat16 except for e4m3 weights; x W^T as in torch.

    weights: for each layer W_qkv (heads of q, then of k, then of v), W_output, W_gate_up (rows of gate, then those of
        up), W_down. With experts the last two are stacks (experts, 2 intermediate, hidden) and (experts, hidden,
        intermediate), and W_router (experts, hidden) follows.
    scales: for each layer float32 scales of rows of the first four, if these are e4m3: (n,), experts' (experts, n).
    biases: for each layer the bias of W_qkv, if the shape has biases.
    latents: for each layer W_UK^T (heads, LATENT_RANK, HEAD_DIM) and W_UV (heads, HEAD_DIM, LATENT_RANK), if
        attention is latent; between heads of W_UV lie as many other rows.
    norms: (layers, `Shape.norms`): attention's, the MLP's, then q's and k's or the latents'. final_norm: (hidden,).
    embedding: (vocab, hidden). rotary: (positions, 2, rotated), cosines and signed sines. scale: of scores.
    """

    weights: Sequence[tuple[Tensor, ...]]
    norms: Tensor
    final_norm: Tensor
    embedding: Tensor
    rotary: Tensor
    eps: float
    scales: Sequence[tuple[Tensor, ...]] = ()
    biases: Sequence[tuple[Tensor, ...]] = ()
    latents: Sequence[tuple[Tensor, ...]] = ()
    scale: float = HEAD_DIM**-0.5


class PersistentDecoder:
    """A model over one paged pool, (num_blocks, num_layers, 2, num_kv_heads, block_size, HEAD_DIM) of bfloat16.

    With latent attention the pool is (num_blocks, num_layers, 1, 1, block_size, LATENT_RANK + ROPE_DIM).

    Programs exchange words through its buffers, so only one stream may use it. stamps: clocks of stages, int64
    (layers, programs, NUM_STAMPS), written with `Shape.traces`.
    """

    def __init__(self, shape: Shape, parameters: Parameters, pool: Tensor) -> None:
        self.shape, self.parameters, self.pool = shape, parameters, pool
        num_layers, device = len(parameters.weights), pool.device
        self._addresses = torch.zeros(num_layers, NUM_ADDRESSES, dtype=torch.int64, device=device)
        of_model = {
            0: parameters.weights, SCALES.value: parameters.scales, BIAS.value: parameters.biases,
            LATENT.value: parameters.latents,
        }  # fmt: skip
        for first, tensors in of_model.items():
            if tensors and device.type != "meta":
                addresses = torch.tensor([[each.data_ptr() for each in layer] for layer in tensors])
                self._addresses[:, first : first + addresses.shape[1]] = addresses
        partials = shape.kv_heads * shape.splits * shape.combined_words
        absorbed = shape.heads * LATENT_RANK if shape.is_latent else 0
        of_attention = shape.qkv, absorbed, partials, absorbed, shape.attended
        sizes = shape.hidden, shape.hidden, *of_attention, shape.experts, shape.inner, 1
        self._words = [torch.zeros(size, dtype=torch.int32, device=device) for size in sizes]
        self.stamps = torch.zeros(num_layers, shape.programs, NUM_STAMPS.value, dtype=torch.int64, device=device)

    def set_shape(self, **changes: Any) -> None:
        """Change fields that do not describe the model: `slots`, `halves_ahead`, `traces`."""
        self.shape = replace(self.shape, **changes)

    def step(
        self, token_ids: Tensor, positions: Tensor, lengths: Tensor, slots: Tensor, block_table: Tensor
    ) -> Tensor:
        """Compute the hidden states (1, hidden) of a token after the final norm; store its K and V in the pool.

        token_ids: int64 (1,). positions: int32 (1,). lengths: int32 (1,), keys that the token sees, including its
        own; 0 if the row is unused. slots: int32 (1,), block id * block_size + offset of its K and V; -1: not stored.
        block_table: int32 (1, any).
        """
        inputs = token_ids, positions, lengths, slots, block_table
        hidden = torch.empty(1, self.shape.hidden, dtype=torch.bfloat16, device=self.pool.device)
        arguments, options = self._launch(inputs, hidden)
        decoder_kernel[(self.shape.programs,)](*arguments, **options)
        return hidden

    def compiler(self) -> Callable[[], None]:
        """Return a function that compiles `step`'s kernel in any thread; it takes seconds if no cache has the kernel.

        The function allocates nothing, since that would break a graph that another thread captures.
        """
        device = self.pool.device
        token, number = (torch.zeros(1, dtype=dtype, device=device) for dtype in (torch.int64, torch.int32))
        hidden = torch.empty(1, self.shape.hidden, dtype=torch.bfloat16, device=device)
        arguments, options = self._launch((token, number, number, number, number[None]), hidden)

        def compile_kernel() -> None:
            with torch.cuda.device(device) if device.type == "cuda" else nullcontext():
                decoder_kernel.run(*arguments, grid=(self.shape.programs,), warmup=True, **options)

        return compile_kernel

    def _launch(self, inputs: tuple[Tensor, ...], hidden: Tensor) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the kernel's arguments and its launch options."""
        of_model, pool = self.parameters, self.pool
        vectors = of_model.norms, of_model.final_norm, of_model.embedding, of_model.rotary
        scale = LOG2_E.value * of_model.scale
        numbers = len(of_model.weights), of_model.eps, scale, pool.stride(1), pool.stride(0)
        arguments = self._addresses, *vectors, pool, *inputs, hidden, *self._words, self.stamps, *numbers
        cooperative = {} if pool.device.type == "meta" else {"launch_cooperative_grid": True}
        return arguments, {"TEXT": self.shape.text, "num_warps": 8, **cooperative}
