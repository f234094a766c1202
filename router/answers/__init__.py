"""Optional parts of answers: a required format, tool calls, separate reasoning."""
