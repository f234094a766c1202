"""KV in 8 bits: `--kv-cache-dtype fp8`."""
