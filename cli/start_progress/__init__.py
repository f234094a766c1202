"""Shows what services do while `serve` starts them: a live table in a terminal, otherwise lines at intervals."""
