"""Triton kernels for GPUs. Only this package imports triton; code for CPUs imports the references beside it.

Each file: the formula, the kernel, its launcher, and the plain-torch reference or where it is. Launchers allocate
nothing but their outputs, never wait for the device and read no device value, so all may be captured in CUDA graphs.
"""
