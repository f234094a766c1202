"""Prompts of which a request wants the first or the last tokens alone."""
