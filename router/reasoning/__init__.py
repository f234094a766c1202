"""Reasoning of chat answers, in a field of its own."""
