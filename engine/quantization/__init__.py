"""Quantized weights: checkpoint formats and their tensor layouts, and quantized linear layers on CPUs and GPUs."""
