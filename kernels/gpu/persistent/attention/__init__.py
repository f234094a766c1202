"""Attention of a program of the persistent kernel."""
