"""Chat template options of a request: variables, and a final message to continue."""
