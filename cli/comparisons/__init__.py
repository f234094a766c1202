"""What an optimization brings on this machine: measured with and without it."""
