"""KV of a prompt that travels while the rest of the prompt is computed: into the prefix cache, before its request."""
