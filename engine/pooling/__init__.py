"""Vectors of prompts, from the hidden states after the final norm: what an embedding is made of."""
