"""Requests from pages of other origins, in a browser (CORS)."""
