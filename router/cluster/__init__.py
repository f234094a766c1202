"""The workers as a router sees them: connections, load, and the policy that chooses among them."""
