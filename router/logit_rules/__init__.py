"""Penalties, biases and masks of tokens, as requests ask for them: `engine/logit_rules` applies them."""
