"""What services do while `serve` starts them: a live table in a terminal, a line now and then elsewhere."""
