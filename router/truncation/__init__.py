"""Truncates prompts to their first or last tokens."""
