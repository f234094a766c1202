"""Grammars in a step: requests' matchers, and the masks of tokens that may come next."""
