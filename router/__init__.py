"""HTTP gateway, dispatch and routing policy: from an OpenAI request to workers and back. Never torch."""
