"""Reasoning that models write before their answers: its formats, and what tells it from the answer."""
