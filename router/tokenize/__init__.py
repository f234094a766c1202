"""Tokens without an answer: the ids of a text or a conversation, and the text of ids."""
