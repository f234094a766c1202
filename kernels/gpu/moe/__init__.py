"""Kernels of mixtures of experts: routing, lists of pairs, grouped GEMMs and GEMVs."""
