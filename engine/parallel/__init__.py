"""Tensor parallelism: one model over several processes that follow the plans of the first (docs/decisions/0121)."""
