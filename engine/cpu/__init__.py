"""The engine on a CPU: runner, sampler, attention over the mapped pool, forward pass of few rows."""
