"""Kernels of steps whose rows have drafts."""
