"""Tool calls in text: how models write them, and how they are read while they arrive."""
