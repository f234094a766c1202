"""Policies other than the one by predicted costs: `--policy round-robin` and others."""
