"""Tools of chat requests: their schemas, and what an answer may call."""
