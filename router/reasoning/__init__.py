"""Reasoning of chat answers, in a separate field."""
