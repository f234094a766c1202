"""Markdown in a terminal, wrapped and colored while it streams. Without it `mini-infer chat` prints plain text."""
