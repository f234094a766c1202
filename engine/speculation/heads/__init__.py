"""Heads of one layer that read the model's hidden states: the KV they keep, and how they draft in a runner."""
