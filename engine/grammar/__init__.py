"""Grammars in a step: matchers of requests, and the masks of the tokens that may come next."""
