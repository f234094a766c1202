"""Qwen2 and Qwen3, and MiMo-7B: families of the core's blocks."""
