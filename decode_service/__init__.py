"""Decode worker: generates tokens, from a peer's KV or from a prompt that it computes itself (local prefill)."""
