"""Grammars that an answer must follow, and the JSON schemas that become some of them."""
