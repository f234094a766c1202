"""Sampling: rules for logits, noise, and the choice of tokens."""
