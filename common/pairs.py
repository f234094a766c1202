"""Pairs of tokens: the quadratic part of a prompt's work."""


def num_pairs(start: float, num_tokens: float) -> float:
    """Sum up the number of tokens before each of `num_tokens` tokens; the first has `start` before it."""
    return num_tokens * (start + num_tokens / 2)
