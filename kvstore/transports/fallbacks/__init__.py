"""Pulls by the next transport when one fails. Without it a pull fails, and the prompt is computed again."""
