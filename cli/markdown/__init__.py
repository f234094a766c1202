"""Markdown in a terminal, wrapped and colored while it streams. Without this wing `mini-infer chat` prints plain
text."""
