"""What a person sees in a terminal: wrapped Markdown as it streams, keys typed meanwhile, and waiting."""
