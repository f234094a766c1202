"""Partial sums of GEMMs whose programs share a K."""
