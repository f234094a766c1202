"""Speculative decoding: a proposer drafts tokens, a step verifies them and keeps those that would be sampled anyway.

`proposer.py` chooses the runner's proposer: `lookup/` drafts from a request's text, `draft_model.py` by a second
model, `eagle/` by an EAGLE-3 head, `mtp/` by the model's own MTP module. `acceptance.py` estimates how likely drafts
are accepted, `draft_length.py` chooses those that pay, and `drafts.py` adds them to a step in the scheduler.
`rejection.py` verifies drafts by rejection sampling, if that is asked for.
"""
