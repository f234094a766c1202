"""Blocks whose output is normed before it is added to the residual."""
