"""Kernels bound by one pass over memory: norms, rotary embedding, gates, copies of KV blocks."""
