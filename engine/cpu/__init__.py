"""The engine on a CPU: runner, attention over the mapped pool, forward pass of few rows."""
