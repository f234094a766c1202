"""Latency objectives: what they leave of a step for prompts, in an engine and in a router's predictions."""
