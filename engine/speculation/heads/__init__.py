"""Heads of one layer over what the model has made of its tokens: what they keep, and how they draft in a runner."""
