"""Grammars of requests: the form that an answer is asked in, and checks before anything is scheduled."""
