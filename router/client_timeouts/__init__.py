"""Timeouts that clients give their requests."""
