"""Parts of prompts that peers pull while the rest is computed: their leases and their loads."""
