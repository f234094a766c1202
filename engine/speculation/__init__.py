"""Speculative decoding: a proposer drafts tokens, a step computes them, those that would be sampled are kept.

`proposer.py` has what proposes, in the runner; `ngram.py` the drafter that is shipped; `drafts.py` the drafts' place
in a step, in the scheduler.
"""
