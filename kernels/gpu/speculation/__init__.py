"""Kernels for steps whose rows have drafts."""
