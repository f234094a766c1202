"""Exchanges of rows between the ranks that hold different experts."""
