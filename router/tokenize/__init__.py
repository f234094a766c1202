"""Tokenization without an answer: the token ids of a text or conversation, and the text of token ids."""
