"""Layers that all model families share, as plain classes over weight tensors."""
