"""Latency objectives: placements that keep them, and moves of running requests."""
