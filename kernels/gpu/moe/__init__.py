"""Experts: routing, lists of pairs, grouped GEMMs and GEMVs."""
