"""Models whose layers see different parts of a sequence: windows, sinks, KV groups."""
