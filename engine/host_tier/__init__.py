"""Host memory behind a KV pool: what is kept there, and the copies."""
