"""Vectors of prompts, pooled from the hidden states after the final norm, for embeddings."""
