"""Vectors of prompts, from the hidden states behind the final norm: what an embedding is made of."""
