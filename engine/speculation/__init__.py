"""Speculative decoding: a drafter proposes tokens, a step computes them, those that would be sampled are kept.

`drafter.py` is the interface, `ngram.py` the drafter that is shipped, `drafts.py` their place in a step.
"""
