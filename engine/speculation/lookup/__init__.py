"""Drafters that look up how earlier occurrences of the last tokens continued."""
