"""C for CPUs, compiled by gcc on first use: how libraries are made and loaded, and decode attention."""
