"""Parts of prompts that peers pull while the rest is computed: leases on them, and what pulls them."""
