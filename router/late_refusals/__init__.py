"""Refuses requests whose answers would come too late, before any work on them."""
