"""Pulls between pools in GPU memory of one host, whose processes map it."""
