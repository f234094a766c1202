"""Latency objectives: placements that meet them, and moves of running requests."""
