"""Parts of messages besides their text: tool calls and their results, refusals, reasoning."""
