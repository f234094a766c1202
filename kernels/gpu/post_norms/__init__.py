"""Norms before and after a residual addition."""
