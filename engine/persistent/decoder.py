"""Decides which models the persistent kernel supports, and collects their weights for it."""

from __future__ import annotations

import logging
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import replace

import torch
from torch import Tensor
from torch.nn import functional

from engine.config import EngineConfig
from engine.gpu.attention.backend import GpuInputs
from engine.gpu.forward import RowDecoder
from engine.kv.memory import kv_layout
from engine.layers.attention import Attention
from engine.layers.block import Block
from engine.layers.linear import Linear
from engine.layers.mlp import Mlp
from engine.mla.latent_attention import LATENT_NORM_EPS, AbsorbedLatentAttention
from engine.models.config import ModelConfig
from engine.models.model import Model
from engine.moe.config import MoeConfig
from engine.moe.expert_stacks import Stack, stacked_of
from engine.moe.moe import Moe
from engine.persistent.settings import PersistentSettings
from kernels.gpu.launch import has_wgmma, num_multiprocessors
from kernels.gpu.persistent.decoder import Parameters, PersistentDecoder
from kernels.gpu.persistent.shape import HEAD_DIM, LATENT_RANK, ROPE_DIM, Shape

logger = logging.getLogger(__name__)
DTYPE = torch.bfloat16  # of norms, KV and plain weights
E4M3 = torch.float8_e4m3fn


def open_decoder(model: Model, pool: Tensor, config: EngineConfig) -> RowDecoder | None:
    """Return a decoder of single rows by the persistent kernel; None if it does not fit the model or is off."""
    if not config.of(PersistentSettings).persistent_kernel or not has_wgmma(pool) or not is_plain(model, pool):
        return None
    is_e4m3 = is_quantized(model.blocks[0])
    shape = shape_of(model.config, pool.shape[4], num_multiprocessors(pool.device), is_e4m3)
    if not shape.fits():
        return None
    decoder = PersistentDecoder(shape, parameters_of(model), pool)
    executor = ThreadPoolExecutor(1, "persistent-kernel")
    compiling = executor.submit(decoder.compiler())  # during the warm-up's other compilations: each takes one core
    executor.shutdown(wait=False)

    def decode(inputs: GpuInputs) -> Tensor:
        own = inputs.groups[0]
        wait((compiling,))  # if it failed, the step raises the error
        return decoder.step(inputs.token_ids, inputs.positions, inputs.lengths, own.slots, own.decode_tables)

    logger.info("steps of one row: one persistent kernel")
    return decode


def shape_of(config: ModelConfig, block_size: int, programs: int, is_e4m3: bool = False) -> Shape:
    """Return the kernel's constants. programs: one per multiprocessor."""
    kv_heads = config.num_heads // 8 if config.latent is not None else config.num_kv_heads
    sizes = config.hidden_size, config.num_heads, kv_heads
    if (moe := config.moe) is None:
        shape = Shape(*sizes, config.intermediate_size, block_size, programs)
    else:
        experts = moe.num_experts, num_chosen(moe), moe.normalizes_weights
        shape = Shape(*sizes, moe.intermediate_size, block_size, programs, *experts)
        shape = replace(shape, shared=moe.num_shared_experts, dense_layers=len(moe.dense_layers))
    shape = replace(shape, is_e4m3=is_e4m3, has_qk_norms=config.qk_norm, has_biases=config.attention_bias)
    shape = replace(shape, is_latent=config.latent is not None)
    return shape.tuned()


def is_plain(model: Model, pool: Tensor) -> bool:
    """Whether the kernel computes all layers: one kind of attention and weights, no biases except W_qkv's."""
    config, dtypes = model.config, {model.embedding.dtype, model.hidden_dtype, pool.dtype}
    layout = kv_layout(config, pool.dtype)
    return (
        config.is_causal
        and model.embedding_scale is None
        and dtypes == {DTYPE}
        and len(layout.groups) == 1
        and not layout.has_windows
        and has_plain_heads(config)
        and all(map(is_plain_attention, model.blocks[::2]))
        and all(is_plain_mlp(block) or is_plain_moe(block) for block in model.blocks[1::2])
        and has_plain_layers(model)
        and len(set(map(is_quantized, model.blocks))) == 1
    )


def has_plain_heads(config: ModelConfig) -> bool:
    if (latent := config.latent) is None:
        return config.head_dim == config.rope_dim == HEAD_DIM
    is_usual = latent.form == "absorbed" and latent.q_lora_rank is None and config.rms_norm_eps == LATENT_NORM_EPS
    sizes = latent.kv_lora_rank, latent.rope_head_dim, latent.nope_head_dim, latent.v_head_dim
    return is_usual and sizes == (LATENT_RANK, ROPE_DIM, HEAD_DIM, HEAD_DIM)


def has_plain_layers(model: Model) -> bool:
    """Whether all layers have an MLP, or only the first ones, at most as large as a token's experts in the others."""
    if (moe := model.config.moe) is None:
        return True
    num_dense, mlps = len(moe.dense_layers), model.blocks[1::2]
    return (
        all(isinstance(each, Moe) for each in mlps[num_dense:])
        and all(isinstance(each, Mlp) for each in mlps[:num_dense])
        and (not num_dense or model.config.intermediate_size <= num_chosen(moe) * moe.intermediate_size)
    )


def is_plain_attention(block: Block) -> bool:
    """Whether the kernel computes the block. Here and below: not subclasses, which compute something else."""
    if type(block) is AbsorbedLatentAttention:
        return not has_biases(block) and has_linears(block)
    if type(block) is not Attention or block.output.bias is not None:
        return False
    return not block.softcap and block.sinks is None and has_linears(block)


def is_plain_mlp(block: Block) -> bool:
    return type(block) is Mlp and not block.is_gelu and not has_biases(block) and has_linears(block)


def is_plain_moe(block: Block) -> bool:
    """Whether experts are chosen by a plain softmax of their logits, and are all on this rank."""
    if type(block) is not Moe or block.slots is not None or block.loads is not None:
        return False
    rule = block.rule
    plain_rule = MoeConfig(
        rule.num_experts, rule.num_experts_per_token, rule.intermediate_size, rule.normalizes_weights,
        rule.dense_layers, rule.num_shared_experts, float32_router=rule.float32_router,
    )  # fmt: skip
    is_biased = block.router_bias is not None or block.choice_bias is not None or has_biases(block)
    return rule == plain_rule and not is_biased and has_linears(block)


def has_biases(block: Block) -> bool:
    return any(ref.layer.bias is not None for ref in block.linears())


def has_linears(block: Block) -> bool:
    """Whether the block's layers are all plain, or all e4m3 with scales of rows."""
    layers = [ref.layer for ref in block.linears()]
    return all(each.is_plain for each in layers) or all(map(has_e4m3_rows, layers))


def has_e4m3_rows(layer: Linear) -> bool:
    has_scales = layer.scales is not None and layer.scales.shape == layer.weight.shape[:1]
    return layer.weight.dtype == E4M3 and has_scales and layer.order is None


def is_quantized(block: Block) -> bool:
    return any(ref.layer.weight.dtype == E4M3 for ref in block.linears())


def parameters_of(model: Model) -> Parameters:
    """Collect the model's weights without copies, except norms, which the kernel reads layer by layer."""
    weights, scales, biases, norms, latents = [], [], [], [], []
    scale = HEAD_DIM**-0.5
    routers = [router for block in model.blocks[1::2] for router in router_of(block)]
    for attention, mlp in zip(model.blocks[::2], model.blocks[1::2], strict=True):
        if isinstance(attention, AbsorbedLatentAttention):
            qkv, of_heads = attention.qkv_a, [attention.kv_norm]
            latents.append((attention.w_uk.transpose(1, 2).contiguous(), attention.w_uv))
            scale = attention.q_factor * attention.query_width**-0.5
        else:
            assert isinstance(attention, Attention)
            qkv, of_heads = attention.qkv, [*qk_norms_of(attention)]
        layers = qkv, attention.output, *weights_of(mlp, model.config.moe)
        weights.append((*(layer.weight for layer in layers), *(router_of(mlp) or routers[:1])))
        if is_quantized(attention):
            scales.append(tuple(layer.scales for layer in layers if layer.scales is not None))
        if qkv.bias is not None:
            biases.append((qkv.bias,))
        norms.append(torch.cat([attention.norm, mlp.norm, *of_heads]))
    of_model = model.final_norm, model.embedding, model.rotary, model.config.rms_norm_eps
    return Parameters(weights, torch.stack(norms), *of_model, scales, biases, latents, scale)


def qk_norms_of(attention: Attention) -> tuple[Tensor, Tensor]:
    if attention.qk_norm is None:
        ones = attention.norm.new_ones(HEAD_DIM)
        return ones, ones
    return attention.qk_norm[0], attention.qk_norm[attention.num_heads]


def weights_of(block: Block, moe: MoeConfig | None) -> tuple[Linear, Linear] | tuple[Stack, Stack]:
    """Return the layers or stacks of gate_up and of down. moe: of the model."""
    if isinstance(block, Moe):
        return stacked_of(block).gate_up, stacked_of(block).down
    assert isinstance(block, Mlp)
    return (block.gate_up, block.down) if moe is None else cut_into_experts(block, moe)


def cut_into_experts(block: Mlp, moe: MoeConfig) -> tuple[Stack, Stack]:
    """Copy an MLP as experts that add up to it, as many as a token has, padded with zeros."""
    count, size = num_chosen(moe), moe.intermediate_size
    gate, up = block.gate_up.weight.chunk(2)
    missing = count * size - len(gate)
    rows = [functional.pad(each, (0, 0, 0, missing)).view(count, size, -1) for each in (gate, up)]
    columns = functional.pad(block.down.weight, (0, missing)).view(-1, count, size)
    return Stack(torch.cat(rows, dim=1), None), Stack(columns.transpose(0, 1).contiguous(), None)


def num_chosen(moe: MoeConfig) -> int:
    """Return the number of a token's experts, with the shared ones."""
    return moe.num_experts_per_token + moe.num_shared_experts


def router_of(block: Block) -> tuple[Tensor, ...]:
    return (stacked_of(block).router,) if isinstance(block, Moe) else ()
