"""Decides what each request computes in the next step. Pure Python on plain data."""
