"""Explains why a request was placed where it was, and how long each part of it took."""
