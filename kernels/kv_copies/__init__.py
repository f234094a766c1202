"""Copies of KV blocks between pools in memory of one kind, with digests of the source in the same pass."""

from importlib import import_module
from typing import Any


def kernels_for(on_gpu: bool) -> Any:
    """Return the module that copies and digests blocks on a GPU, which needs triton, or on a CPU."""
    return import_module("kernels.gpu.kv_copies.kv_copy" if on_gpu else "kernels.kv_copies.kv_copy")
