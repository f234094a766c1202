"""Rotary embeddings that are stretched beyond the context that a model was trained with."""
