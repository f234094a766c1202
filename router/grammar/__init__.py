"""Grammars of requests: the format that a request asks of its answer, checked before anything is scheduled."""
