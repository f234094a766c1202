"""Collectives between the GPUs of a tensor-parallel group, within kernels."""
