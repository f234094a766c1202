"""Attention of an engine on a CPU by compiled C (`kernels/native`)."""
