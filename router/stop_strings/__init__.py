"""Stop strings: client-given texts that end an answer."""
