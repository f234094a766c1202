"""One-sided reads of host memory with NIXL."""
