"""Stop strings: texts of a client that end an answer."""
