"""Measures what optimizations bring on this machine, with and without each."""
