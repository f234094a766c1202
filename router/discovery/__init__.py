"""Workers found by a host name, which come and go."""
