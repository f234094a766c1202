"""Tools of chat requests: their schemas, and which of them an answer may call."""
