"""Grammars that answers must follow, and JSON schemas that are turned into grammars."""
