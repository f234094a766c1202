"""Workers of several processes: pools of their ranks, and pipeline stages on other hosts."""
