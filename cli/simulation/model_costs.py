"""Roofline estimate of a model's step costs on GPUs, for any number of ranks. Pure except for `model_size`, which
reads the model's config.

A rank reads its part of the weights and of KV, computes its part of the GEMMs, and takes part in two all-reduces per
layer. Rates were measured on H200s (docs/benchmarks.md: one GPU, and two with `--tp 2`); more than two ranks were not
measured, and an all-reduce is assumed to take 2 (ranks - 1) / ranks times as long.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from common.model_files import resolve_model
from engine.moe.layers import has_experts
from engine.simulated.step_cost import SimulatedCost

if TYPE_CHECKING:
    from engine.models.config import ModelConfig

WEIGHT_BYTES = {"none": 2.0, "fp8": 1.0, "w8a8": 1.0, "int8-weight": 1.0, "int4-weight": 0.625}
GEMM_SPEEDUP = {"fp8": 1.9, "w8a8": 1.6}  # of prompts, over bfloat16: 8,192 tokens take 118 and 136 ms instead of 188
KV_BYTES = 2  # of a number in the cache

STEP_SECONDS = 0.4e-3  # of a served model's step, in addition to the engine's
LAYER_SECONDS = 20e-6  # per layer on every rank: short kernels, and their launches
ROW_SECONDS = 30e-12  # per layer and number of the hidden state
ROW_GEMM = 0.2  # share of a row's operations that reading the weights does not hide, up to 256 rows
PROMPT_SECONDS = 50e-6  # per layer in a step with prompt tokens: kernels are launched one by one
REDUCE_SECONDS = 4e-6  # of an all-reduce, however short
ROW_REDUCE_BYTES = 80e9  # per second, for decode steps up to 2 MB
PROMPT_REDUCE_BYTES = 300e9  # per second, for prompts
MEMORY_SHARE = 0.9  # of a GPU's memory, for weights and KV
WORK_BYTES = 4e9  # for activations and other memory of steps


@dataclass(frozen=True, slots=True)
class Gpu:
    """A GPU's memory in bytes, and its achieved bytes and bfloat16 operations per second."""

    memory_bytes: float
    read_weights: float
    read_kv: float
    gemm: float
    attention: float


H200 = Gpu(141e9, 4.6e12, 4.1e12, 6.1e14, 4.5e14)
GPUS = {
    "h200": H200,
    "h100": replace(H200, memory_bytes=80e9, read_weights=3.2e12, read_kv=2.9e12),  # scaled by memory bandwidth
}


@dataclass(frozen=True, slots=True)
class ModelSize:
    """The sizes of a model that determine its step times. Every step is assumed to read all experts."""

    num_weights: int
    num_active: int  # weights that each prompt token is multiplied by
    num_layers: int
    hidden_size: int
    num_heads: int
    q_size: int  # of all heads
    num_kv_heads: int
    kv_numbers: int  # numbers per token in the cache, in all layers and heads
    quant_mode: str = "none"

    @property
    def weight_bytes(self) -> float:
        return self.num_weights * WEIGHT_BYTES[self.quant_mode]

    def kv_bytes(self, ranks: int) -> float:
        """Return a token's bytes on each rank. With fewer KV heads than ranks, several ranks hold the same head."""
        return self.kv_numbers * KV_BYTES / min(ranks, self.num_kv_heads)


def model_size(model: str, quant_mode: str = "none") -> tuple[ModelSize, ModelConfig]:
    """Read the sizes from config.json alone. Raises ConfigError and UnsupportedModelError."""
    from engine.models.families import family_of  # imports torch, which --help avoids
    from engine.models.hf_config import architecture_of, config_from_hf, read_hf_config

    raw = read_hf_config(resolve_model(model, weights=False).path)
    family = family_of(architecture_of(raw))
    raw = family.text_config(raw) if family.text_config is not None else raw
    config = family.adapt_config(config_from_hf(raw), raw)
    return size_of(config, sum(map(math.prod, family.skeleton(config)[1].values())), quant_mode), config


def size_of(config: ModelConfig, num_weights: int, quant_mode: str) -> ModelSize:
    ends = config.vocab_size * config.hidden_size * (1 if config.tie_word_embeddings else 2)
    idle = 0
    if (moe := config.moe) is not None:
        num_layers = sum(has_experts(config, layer) for layer in range(config.num_layers))
        expert = 3 * config.hidden_size * moe.intermediate_size
        idle = num_layers * (moe.num_experts - moe.num_experts_per_token) * expert
    return ModelSize(
        num_weights, num_weights - ends - idle, config.num_layers, config.hidden_size, config.num_heads,
        config.q_size, config.num_kv_heads, config.num_layers * config.num_kv_planes * config.kv_size, quant_mode,
    )  # fmt: skip


def step_cost(model: ModelSize, gpu: Gpu, ranks: int) -> SimulatedCost:
    """Return the cost of a step's parts if `ranks` GPUs share the model."""
    layers, hidden_bytes = model.num_layers, 2 * model.hidden_size
    starts, rows, prompts = _reduces(layers, hidden_bytes, ranks)
    read = model.weight_bytes / ranks / gpu.read_weights
    token = 2 * model.num_active / ranks / (gpu.gemm * GEMM_SPEEDUP.get(model.quant_mode, 1.0))
    return SimulatedCost(
        base=STEP_SECONDS + layers * LAYER_SECONDS + read + starts,
        row=layers * model.hidden_size * ROW_SECONDS + ROW_GEMM * token + rows,
        context=model.kv_bytes(ranks) / gpu.read_kv,
        prompt=layers * PROMPT_SECONDS + starts,
        prompt_token=token + prompts,
        prompt_context=4 * layers * model.q_size / ranks / gpu.attention,
        weights=read,
    )


def _reduces(layers: int, hidden_bytes: int, ranks: int) -> tuple[float, float, float]:
    """Return the seconds that all-reduces add to a step, to each of its rows, and to each prompt token."""
    if ranks == 1:
        return 0.0, 0.0, 0.0
    count, share = 2 * layers, 2 * (ranks - 1) / ranks
    return (
        count * REDUCE_SECONDS * share,
        count * hidden_bytes * share / ROW_REDUCE_BYTES,
        count * hidden_bytes * share / PROMPT_REDUCE_BYTES,
    )


def num_kv_blocks(model: ModelSize, gpu: Gpu, ranks: int, block_size: int) -> int:
    """Return the number of blocks that fit next to the weights; 0 if the weights do not fit."""
    room = MEMORY_SHARE * gpu.memory_bytes - WORK_BYTES - model.weight_bytes / ranks
    return max(int(room / (block_size * model.kv_bytes(ranks))), 0)
