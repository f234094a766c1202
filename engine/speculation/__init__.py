"""Speculative decoding: a drafter proposes tokens, a step computes them, those that would be sampled are kept.

`drafter.py` is the interface, `drafts.py` the drafts' place in a step.
"""
