"""Reasoning that models write before their answers: its formats, and how it is separated from the answer."""
