"""Requests by priority: who goes first, and who gives way to a newcomer."""
