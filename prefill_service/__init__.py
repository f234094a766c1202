"""Prefill worker: computes prompts. Each Submit ends with the first token and a handle on the leased KV."""
