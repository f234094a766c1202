"""Parts of messages beside their text: tool calls and their results, refusals, reasoning."""
