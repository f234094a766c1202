"""Policies besides the default by predicted costs: `--policy round-robin` and others."""
