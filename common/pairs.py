"""Pairs of tokens: the quadratic part of a prompt's work."""


def num_pairs(start: float, num_tokens: float) -> float:
    """Tokens before each of so many, summed; the first has `start` before it."""
    return num_tokens * (start + num_tokens / 2)
