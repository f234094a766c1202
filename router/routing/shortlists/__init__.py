"""Selects the few workers of a large cluster that are worth a prediction."""
