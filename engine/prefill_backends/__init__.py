"""Attention of prompts by libraries that read contiguous K and V: FlashAttention-3 and cuDNN."""
