"""Speculative decoding: a proposer drafts tokens, a step computes them, those that would be sampled are kept.

`proposer.py` chooses what proposes in the runner: `ngram.py` and `suffix.py` by a request's text, `draft_model.py` by
a second model, `eagle/` by a head of the model, `mtp/` by its own module. `acceptance.py` estimates how likely drafts
are accepted, `draft_length.py` chooses those that pay, and `drafts.py` puts them into a step, in the scheduler.
`rejection.py` verifies drafts by what they were drawn from, where that is asked for.
"""
