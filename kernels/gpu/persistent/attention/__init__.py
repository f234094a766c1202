"""Attention in the persistent kernel: the part of one program."""
