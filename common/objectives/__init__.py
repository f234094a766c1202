"""Latency objectives: how much time of a step they leave for prompts, for engines and for a router's predictions."""
