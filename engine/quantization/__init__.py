"""Quantized weights: schemes of checkpoints, their layouts, and linear layers over them on CPUs and GPUs."""
