"""Triton kernels for GPUs. Only this package imports triton; CPUs use the plain-torch references outside of it.

Each file has the formula, the kernel, its launcher, and the plain-torch reference or its location. Launchers allocate
only their outputs, never wait for the device and read no value from it, so CUDA graphs can capture them.
"""
