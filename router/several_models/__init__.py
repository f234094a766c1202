"""Several models behind one router, each with its own workers."""
