"""Which models the persistent kernel takes, and how it finds their weights."""

from __future__ import annotations

import logging

import torch
from torch import Tensor

from engine.config import EngineConfig
from engine.gpu.attention.backend import GpuInputs
from engine.gpu.forward import RowDecoder
from engine.kv.memory import kv_layout
from engine.layers.attention import Attention
from engine.layers.block import Block
from engine.layers.mlp import Mlp
from engine.models.model import Model
from engine.persistent.settings import PersistentSettings
from kernels.gpu.launching.launch import has_wgmma, num_multiprocessors
from kernels.gpu.persistent.decoder import Parameters, PersistentDecoder
from kernels.gpu.persistent.shape import HEAD_DIM, Shape

logger = logging.getLogger(__name__)
DTYPE = torch.bfloat16  # of weights, norms and KV


def open_decoder(model: Model, pool: Tensor, config: EngineConfig) -> RowDecoder | None:
    """A decoder of single rows by the persistent kernel; None: it does not take the model, or is switched off."""
    if not config.of(PersistentSettings).persistent_kernel or not has_wgmma(pool) or not is_plain(model, pool):
        return None
    shape = shape_of(model, pool.shape[4], num_multiprocessors(pool.device))
    if not shape.fits():
        return None
    decoder = PersistentDecoder(shape, parameters_of(model), pool)

    def decode(inputs: GpuInputs) -> Tensor:
        own = inputs.groups[0]
        return decoder.step(inputs.token_ids, inputs.positions, inputs.lengths, own.slots, own.decode_tables)

    logger.info("steps of one row: one persistent kernel")
    return decode


def shape_of(model: Model, block_size: int, programs: int) -> Shape:
    """The kernel's constants. programs: one for each multiprocessor."""
    config = model.config
    return Shape(
        config.hidden_size, config.num_heads, config.num_kv_heads, config.intermediate_size, block_size, programs
    )


def is_plain(model: Model, pool: Tensor) -> bool:
    """Whether all layers are what the kernel computes: DTYPE without biases, QK norms, one kind of attention."""
    config, dtypes = model.config, {model.embedding.dtype, model.hidden_dtype, pool.dtype}
    layout = kv_layout(config, pool.dtype)
    is_usual = config.head_dim == config.rope_dim == HEAD_DIM and config.is_causal and model.embedding_scale is None
    return (
        is_usual
        and dtypes == {DTYPE}
        and len(layout.groups) == 1
        and not layout.has_windows
        and all(is_plain_block(block, index) for index, block in enumerate(model.blocks))
    )


def is_plain_block(block: Block, index: int) -> bool:
    """Whether it is the model's attention or MLP at that place. Subclasses compute something else."""
    if index % 2 == 0:
        is_known = (
            type(block) is Attention and block.qk_norm is not None and not block.softcap and block.sinks is None
        )
    else:
        is_known = type(block) is Mlp and not block.is_gelu
    return is_known and all(ref.layer.is_plain and ref.layer.bias is None for ref in block.linears())


def parameters_of(model: Model) -> Parameters:
    """The model's weights where they are, but for norms, which the kernel reads a layer at a time."""
    weights, norms = [], []
    for attention, mlp in zip(model.blocks[::2], model.blocks[1::2], strict=True):
        assert isinstance(attention, Attention)
        assert isinstance(mlp, Mlp)
        assert attention.qk_norm is not None
        linears = attention.qkv, attention.output, mlp.gate_up, mlp.down
        qkv, output, gate_up, down = (each.weight for each in linears)
        weights.append((qkv, output, gate_up, down))
        of_q, of_k = attention.qk_norm[0], attention.qk_norm[attention.num_heads]
        norms.append(torch.cat([attention.norm, mlp.norm, of_q, of_k]))
    return Parameters(
        weights, torch.stack(norms), model.final_norm, model.embedding, model.rotary, model.config.rms_norm_eps
    )
