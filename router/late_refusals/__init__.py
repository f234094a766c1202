"""Refusals of requests whose answers would come too late, before any work is begun for them."""
