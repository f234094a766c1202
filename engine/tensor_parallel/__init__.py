"""Tensor parallelism: ranks that execute the same plans on their shards, and what they exchange."""
