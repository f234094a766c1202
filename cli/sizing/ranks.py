"""Chooses how many GPUs share a model: as few as hold its weights."""

from __future__ import annotations

import subprocess

from cli.sizing.model_size import weight_bytes
from engine.config import EngineConfig

WEIGHT_SHARE = 0.6  # largest share of a GPU's memory: the rest is for KV and the largest step
QUERY_SECONDS = 10.0
_QUERY = ("nvidia-smi", "--query-gpu=memory.total", "--format=csv,noheader,nounits")


def choose_tp(engine: EngineConfig, num_gpus: int) -> tuple[int, str]:
    """Return the ranks of a worker, and why there are several."""
    weights, memory = weight_bytes(engine), smallest_memory()
    tp = fitting_tp(num_gpus, memory, weights)
    if tp == 1:
        return 1, ""
    return tp, f"--tp {tp}: weights of {weights / 1e9:.0f} GB and KV do not fit a GPU of {memory / 1e9:.0f} GB"


def fitting_tp(num_gpus: int, memory_bytes: int, weights: int) -> int:
    """Return the smallest power of two of GPUs that hold the weights with room for KV; if none do, the most there
    are.

    weights: in bytes; 0: unknown, as memory_bytes may be.
    """
    tp = 1
    while memory_bytes and weights > tp * memory_bytes * WEIGHT_SHARE and 2 * tp <= num_gpus:
        tp *= 2
    return tp


def smallest_memory() -> int:
    """Return the bytes of the GPU with the least memory; 0 if the driver's tool does not tell."""
    try:
        found = subprocess.run(_QUERY, capture_output=True, text=True, timeout=QUERY_SECONDS, check=True).stdout
        return min(int(line) for line in found.split()) << 20
    except (OSError, subprocess.SubprocessError, ValueError):
        return 0
