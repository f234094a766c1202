"""Quantized weights on CPUs: packing and reference GEMMs."""
