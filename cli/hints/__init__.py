"""Hints of `serve` for users of other programs, and for misspelt names."""
