"""Which path was meant by one that there is not."""
