"""Keys for libraries that read contiguous memory."""
