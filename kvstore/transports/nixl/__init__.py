"""One-sided reads of host memory by NIXL."""
