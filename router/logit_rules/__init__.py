"""Penalties, biases and masks of tokens that requests ask for; `engine/logit_rules` applies them."""
