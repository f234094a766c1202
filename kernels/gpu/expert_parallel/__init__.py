"""Rows on their way between the ranks that hold different experts."""
