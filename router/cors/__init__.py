"""Requests from web pages of other origins (CORS)."""
