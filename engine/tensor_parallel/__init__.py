"""Tensor parallelism: ranks execute the same plans on their shards, and exchange activations."""
