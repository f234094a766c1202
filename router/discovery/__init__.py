"""Workers behind a host name, which come and go."""
