"""The engine on a CPU: runner, forward pass, attention over the KV pool, sampler."""
