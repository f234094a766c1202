"""Roofline of the machine: bytes that a decode step must read, operations of a prompt, and measured peak rates.

A floor is the time for the weights and KV of a step at full memory bandwidth, or for a prompt's GEMMs at the speed of
a large one. Figures are given as fractions of it, so that machines can be compared.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import torch

from engine.cpu_gemms.gemms import dense_linear
from engine.mla.latent_attention import LatentAttention
from engine.models.config import ModelConfig
from engine.models.families import family_of
from engine.moe.moe import Moe
from kvstore.layout import DTYPE_BYTES

# One 8-bit or 4-bit number a weight. q8_0 has a float16 for each 32; 4-bit weights carry two bfloat16 for each 32, in
# checkpoints mostly each 128.
MODE_BYTES = {"int8-weight": 1.0, "q8_0": 1.0625, "w8a8": 1.0, "fp8": 1.0, "int4-weight": 0.625}
HEAD_BYTES = {"int4-weight": 1.0}  # of the output projection, if it has another format
PACKED_BYTES = {
    "gptq-4bit": 0.53125, "awq-4bit": 0.53125, "gptq-8bit": 1.0, "fp8-blocks": 1.0, "fp8-weights": 1.0,
    "w4a8": 0.53125, "w4a16": 0.53125, "w8a8": 1.0, "w8a16": 1.0, "fp8": 1.0, "fp8a16": 1.0,
    "gguf": 0.5625,  # Q4_0 and Q4_K, the smallest of the common types
}  # fmt: skip
MXFP4_BYTES = 0.53125  # only of experts
COMPRESSED_TENSORS = "compressed-tensors-"  # before names of schemes, joined by "+"


@dataclass(frozen=True)
class Peaks:
    """Measured rates of this machine."""

    read_bytes_per_second: float
    flops_per_second: float


def measure_peaks(device: torch.device, dtype: torch.dtype) -> Peaks:
    """Return the best of several runs: reading a large tensor, and a large GEMM."""
    on_gpu = device.type == "cuda"
    data = torch.empty((4 << 30) // 4 if on_gpu else (512 << 20) // 4, device=device).fill_(1.0)
    seconds = _best_seconds(lambda: data.sum(), device)
    size = 8192 if on_gpu else 1536
    left, right = torch.randn(size, size, device=device).to(dtype), torch.randn(size, size, device=device).to(dtype)
    multiply = dense_linear(right, None)
    product_seconds = _best_seconds(lambda: multiply(left), device)
    return Peaks(data.numel() * 4 / seconds, 2 * size**3 / product_seconds)


@cache
def num_weights(config: ModelConfig, num_tokens: int = 1) -> int:
    """Return the weights that `num_tokens` tokens read: all linear layers, but only experts that a token chooses.

    Tokens are assumed to choose independently, with equal probability for every expert.
    """
    model, _ = family_of(config.architecture).skeleton(config)
    total = config.vocab_size * config.hidden_size
    for block in model.blocks:
        held = sum(ref.layer.weight.numel() for ref in block.linears())
        if isinstance(block, Moe):
            held -= len(block.experts) * _expert_size(block, config) - _num_read(block, config, num_tokens)
        if isinstance(block, LatentAttention):
            held += block.kv_b.numel()
        total += held
    return total


def num_expert_weights(config: ModelConfig, num_tokens: int) -> int:
    """Return the expert weights that `num_tokens` tokens read, a part of `num_weights`."""
    model, _ = family_of(config.architecture).skeleton(config)
    return sum(_num_read(block, config, num_tokens) for block in model.blocks if isinstance(block, Moe))


def _num_read(block: Moe, config: ModelConfig, num_tokens: int) -> int:
    num_experts = len(block.experts)
    idle = num_experts * (1 - block.num_chosen / num_experts) ** num_tokens
    return round((num_experts - idle) * _expert_size(block, config))


def _expert_size(block: Moe, config: ModelConfig) -> int:
    return 3 * config.hidden_size * block.rule.intermediate_size


def weight_bytes(config: ModelConfig, dtype: str, quantization: str, num_tokens: int = 1) -> float:
    """Return the bytes of the linear layers' weights that a step of `num_tokens` reads.

    quantization: a mode, or a checkpoint's label. Checkpoints mostly keep the output projection unquantized. Of
    several schemes the smallest counts, so that the floor stays below what must be read.
    """
    plain = DTYPE_BYTES[dtype]
    head = config.vocab_size * config.hidden_size
    inner = num_weights(config, num_tokens) - head
    if quantization in MODE_BYTES or quantization == "none":
        each = MODE_BYTES.get(quantization, plain)
        return inner * each + head * HEAD_BYTES.get(quantization, each)
    if quantization == "mxfp4":
        return (inner + head) * plain - num_expert_weights(config, num_tokens) * (plain - MXFP4_BYTES)
    schemes = quantization.removeprefix(COMPRESSED_TENSORS).split("+")
    return inner * min(PACKED_BYTES[scheme] for scheme in schemes) + head * plain


def kv_bytes(config: ModelConfig, dtype: str, num_tokens: float) -> float:
    """Return the bytes of KV that a query after `num_tokens` tokens reads."""
    seen = sum(min(num_tokens, window or num_tokens) for window in config.windows or [0] * config.num_layers)
    return seen * config.num_kv_planes * config.kv_size * DTYPE_BYTES[dtype]


def decode_floor_seconds(
    config: ModelConfig, dtype: str, quant_mode: str, batch: int, mean_context: float, peaks: Peaks,
    kv_dtype: str = "",
) -> float:  # fmt: skip
    """Return the time of a step: all weights once, and every sequence's KV. kv_dtype: of the cache, if different."""
    read = batch * kv_bytes(config, kv_dtype or dtype, mean_context)
    return (weight_bytes(config, dtype, quant_mode, batch) + read) / peaks.read_bytes_per_second


def prefill_floor_seconds(config: ModelConfig, num_tokens: int, peaks: Peaks) -> float:
    """Count two operations per weight and token, four per query, visible key and dimension; logits of one token."""
    inner = num_weights(config) - config.vocab_size * config.hidden_size
    pairs = sum(_visible_pairs(num_tokens, window) for window in config.windows or [0] * config.num_layers)
    attention = 4 * config.q_size * pairs
    return (2 * inner * num_tokens + attention) / peaks.flops_per_second


def _visible_pairs(num_tokens: int, window: int) -> float:
    """Return the pairs of a prompt's queries and visible keys. window: most keys that a query sees; 0: all."""
    hidden = max(num_tokens - window, 0) if window else 0
    return (num_tokens * (num_tokens + 1) - hidden * (hidden + 1)) / 2


def _best_seconds(work: Callable[[], object], device: torch.device) -> float:
    best = float("inf")
    for _ in range(5):
        began = time.perf_counter()
        work()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        best = min(best, time.perf_counter() - began)
    return best
