"""C for CPUs, compiled by gcc on first use: building and loading of libraries, and decode attention."""
