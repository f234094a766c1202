"""Parts of messages in addition to text: tool calls and their results, refusals, reasoning."""
