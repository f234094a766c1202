"""Exchanges between the GPUs of a tensor-parallel group, from inside kernels."""
