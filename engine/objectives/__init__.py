"""Latency objectives in an engine: how many prompt tokens a step takes beside rows that decode."""
