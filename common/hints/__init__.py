"""Which flag was meant by one that there is not."""
