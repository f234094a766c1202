"""Leases on parts of prompts, which peers pull while the rest is computed."""
